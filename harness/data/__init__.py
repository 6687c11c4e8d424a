"""Corpora, tokenizers and batches: what a run reads."""
