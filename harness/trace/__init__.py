"""A training step on tensors without data: memory and collectives of any model on any number of ranks."""
