"""Usual values of a bench's figures, each with its source; a figure without one is shown as first seen."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RESULTS = "benchmarks/RESULTS.md"
_GPU = "docs/gpu.md"
_SHEET = "data sheets of NVIDIA, docs.nvidia.com"


@dataclass(frozen=True)
class Usual:
    """Usual values of a figure.

    Attributes:
        figure: its key.
        device: pattern of the device's name.
        low, high: between which it usually is; None: no bound.
        source: of the numbers.
    """

    figure: str
    device: str
    low: float | None
    high: float | None
    source: str

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}" if self.low != self.high else f"{self.low:g}"
        return f"at least {self.low:g}" if self.low is not None else f"at most {self.high:g}"


_MUST = "docs/reliability.md: what a run counts on"
TABLE = (
    Usual("damaged", "", 0, 0, _MUST),
    Usual("torn", "", 0, 0, _MUST),
    Usual("seen_seconds", "", None, 60.0, _MUST),
    Usual("matmul_wrong", "", 0, 0, "small integers, whose sums are exact"),
    Usual("unproven", "", 0, 0, _MUST),
    Usual("probe_difference", "NVIDIA", None, 0.02, f"{_GPU}: 0.007 with vLLM in bf16 on an H100, allowed three times"),
    Usual("probe_difference", "^(?!NVIDIA)", None, 1e-3, "float32 on CPUs, a tenth of generator.inference_engine.probe_tolerance"),
    Usual("logprob_mismatch", "NVIDIA", None, 0.02, f"{_GPU}: 0.002 to 0.007 with vLLM in bf16 on an H100, allowed three times"),
    Usual("logprob_mismatch", "^(?!NVIDIA)", None, 1e-3, "float32 on CPUs, where both compute the same formula"),
    Usual("resumed_difference", "^(?!NVIDIA)", 0, 0, _MUST + "; on GPUs trainer.deterministic makes kernels repeat their sums"),
    Usual("matmul_tflops", "H100 80GB|H200", 692.0, 989.4, f"{_SHEET}: 989 TFLOP/s of bf16, of which 884 were measured ({_GPU}); below 0.7 of it hpcrl doctor warns"),
    Usual("matmul_tflops", "A100", 218.0, 312.0, f"{_SHEET}: 312 TFLOP/s of bf16; below 0.7 of it hpcrl doctor warns"),
    Usual("mfu", "H100|H200", 0.13, None, f"{_RESULTS}, One GPU: 0.13 to 0.33 on an H200, 0.6 billion parameters"),
    Usual("bus_bandwidth_node", "H100 80GB|H200", 225.0, None, f"{_SHEET}: NVLink 900 GB/s in both directions together; half of one direction"),
    Usual("bus_bandwidth_node", "A100-SXM", 150.0, None, f"{_SHEET}: NVLink 600 GB/s in both directions together; half of one direction"),
    Usual("memory_of_estimate", "NVIDIA", 0.7, 1.1, f"{_RESULTS}, One GPU: 12.6 GiB where 13.9 were estimated, 44.2 for 43.6"),
)  # fmt: skip
"""All that is known. Bounds that are no measured value say how they follow from one."""


def usual_of(figure: str, device: str) -> Usual | None:
    """Return the usual values of a figure on a device, by its name; None: there are none yet."""
    key = re.sub(r"(_\d+)+$", "", figure)  # of lengths
    return next((one for one in TABLE if one.figure == key and re.search(one.device, device)), None)
