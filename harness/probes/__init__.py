"""Probes watch a run without changing it: with any set of them the losses are the same, bit for bit."""
