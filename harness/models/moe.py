"""A mixture of experts in place of the feed-forward."""

from __future__ import annotations

from torch import nn

from harness.spec import ModelSpec


class MoE(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        raise NotImplementedError
