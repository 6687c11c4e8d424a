"""Ask whether a paper's claim about low-precision or distributed training holds here, and show the answer."""

__version__ = "0.1.0"
