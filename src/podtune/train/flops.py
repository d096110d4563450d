"""How much arithmetic a token costs and how much a device can do: what MFU is a ratio of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podtune.weights.param import Param, is_param
from podtune.weights.tree import named_leaves

# Dense bfloat16 peak of one device, FLOP/s, by the whole words its device_kind starts with; the longest that fits
# counts. TPUs: the public TPU system-architecture pages. NVIDIA: data sheets, without sparsity.
PEAK_FLOPS: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
}


@dataclass(frozen=True)
class TokenCost:
    """FLOPs of the forward and backward pass of one token, without recomputation and without attention's scores.

    times_weights: 6 for full fine-tuning (2 forward, 4 backward); 4 for LoRA, which needs no gradient of the frozen
    weights. weights: those that multiply every token, so without the embedding's lookup. head: those of the
    unembedding, which multiply the tokens that bear loss.
    """

    weights: int
    head: int
    times_weights: int

    def flops(self, positions: float, trained: float) -> float:
        """Of so many tokens, of which so many bear loss."""
        return self.times_weights * (self.weights * positions + self.head * trained)

    def __str__(self) -> str:
        times = self.times_weights
        return f"{times} x {self.weights:,} weights and, where it bears loss, {times} x {self.head:,}"


def token_cost(description: Any, method: str) -> TokenCost:
    """From the model's own description: every linear weight and the head, tied or not."""
    params: Mapping[str, Param] = named_leaves(description, is_leaf=is_param)
    sizes = Counter[str]()
    for param in params.values():
        sizes[param.kind] += param.size
    return TokenCost(sizes["linear"], sizes["head"] or sizes["lookup"], 6 if method == "full" else 4)


def peak_flops(device: Any) -> float:
    """Of one device; nan where it is not known, as for every CPU."""
    known = [kind for kind in PEAK_FLOPS if f"{device.device_kind} ".startswith(f"{kind} ")]
    return PEAK_FLOPS[max(known, key=len)] if known and device.platform != "cpu" else math.nan
