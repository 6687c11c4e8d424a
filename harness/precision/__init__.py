"""Number formats, rounding, scaling, and the linear layer that applies them to its three GEMMs."""
