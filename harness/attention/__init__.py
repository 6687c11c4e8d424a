"""Attention whose every rounding is written down, to find out which of them has a direction."""
