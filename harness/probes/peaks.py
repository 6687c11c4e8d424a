"""Peak rates of devices, the denominator of MFU. A device not listed has none: a guess is worse than NULL."""

from __future__ import annotations

import torch

DENSE_BF16_TFLOPS: dict[str, tuple[float, str]] = {
    "NVIDIA A100-SXM4-40GB": (312.0, "NVIDIA A100 data sheet"),
    "NVIDIA A100-SXM4-80GB": (312.0, "NVIDIA A100 data sheet"),
    "NVIDIA A100-PCIE-40GB": (312.0, "NVIDIA A100 data sheet"),
    "NVIDIA A100 80GB PCIe": (312.0, "NVIDIA A100 data sheet"),
    "NVIDIA H100 80GB HBM3": (989.5, "NVIDIA H100 data sheet, SXM: 1,979 with sparsity"),
    "NVIDIA H100 NVL": (835.5, "NVIDIA H100 data sheet, NVL: 1,671 with sparsity"),
    "NVIDIA H200": (989.5, "NVIDIA H200 data sheet, SXM: 1,979 with sparsity"),
    "NVIDIA GH200 480GB": (989.5, "NVIDIA GH200 data sheet: 1,979 with sparsity"),
    "NVIDIA L4": (121.0, "NVIDIA L4 data sheet: 242 with sparsity"),
    "NVIDIA L40S": (362.05, "NVIDIA L40S data sheet: 733 with sparsity"),
    "NVIDIA GeForce RTX 4090": (165.2, "NVIDIA Ada GPU architecture paper, BF16 with FP32 accumulation"),
}
"""Name as torch.cuda.get_device_name gives it -> (dense BF16 TFLOP/s, source)."""


def dense_bf16_peak(device: torch.device) -> tuple[float | None, str]:
    """(FLOP/s of dense BF16 products, source), or (None, why it is not known)."""
    if device.type != "cuda":
        return (
            None,
            "the peak of this CPU is not known: it depends on clocks and matrix units that are not published",
        )
    name = torch.cuda.get_device_name(device)
    if name not in DENSE_BF16_TFLOPS:
        return None, f"the peak of {name!r} is not in the table of known devices (harness/probes/peaks.py)"
    tflops, source = DENSE_BF16_TFLOPS[name]
    return tflops * 1e12, f"dense BF16 {tflops:g} TFLOP/s of one {name} ({source})"
