"""Closed-form counts of parameters, FLOPs and bytes, without torch: `suite plan` uses them."""
