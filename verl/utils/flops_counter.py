"""How much arithmetic a step does, and how much the device could do.

Counted are the matrix products a packed forward and backward need: decoder layers for every token, causal attention
within rows, the output head for response tokens only (that is where it runs). Recomputation under gradient
checkpointing is not counted, so the quotient is model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch

from verl.utils.model import mlp_width

logger = logging.getLogger(__name__)

# Dense bf16 peak in TFLOP/s by the vendors' data sheets, by name. No digit may follow: H200 is no H20, A4000 no A40.
_PEAK_TFLOPS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
    ("MI250X", 383.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("910B[1-4]?", 354.0),
)


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """Dense bf16 peak of this process's device in ``unit``\\ FLOP/s (B, K, M, G, T, P); ``inf`` if unknown or a CPU."""
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    units = {"B": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    words = device_name.upper().replace("-", " ")
    for name, tera in _PEAK_TFLOPS:
        if re.search(rf"{name.upper()}(?!\d)", words):
            return tera * 1e12 / units[unit]
    return float("inf")


class FlopsCounter:
    """Arithmetic of decoder-only models, from their config. Every MLP is counted as a gated one.

    Args:
        config: a transformers config with the usual names (``hidden_size``, ``num_hidden_layers`` …).
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.layers = config.num_hidden_layers
        self.hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.intermediate = mlp_width(config)
        self.vocabulary = config.vocab_size

    def layer_parameters(self) -> int:
        """Weights of one decoder layer's matrix products; of experts those that a token goes to."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def training_flops(self, row_lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """FLOPs of one forward and backward over rows.

        Args:
            row_lengths: tokens of each row.
            head_tokens: positions at which the output head runs; None means all.
        """
        tokens = sum(row_lengths)
        dense = 6.0 * tokens * self.layers * self.layer_parameters()
        head = 6.0 * (tokens if head_tokens is None else head_tokens) * self.hidden * self.vocabulary
        # Causal: half of the score matrix; two products (scores, values), forward once and backward twice.
        attention = 6.0 * self.layers * self.heads * self.head_dim * sum(float(n) * n for n in row_lengths)
        return dense + head + attention

    def estimate_flops(
        self, batch_seqlens: Sequence[int], delta_time: float, head_tokens: int | None = None
    ) -> tuple[float, float]:
        """``(achieved, peak)`` TFLOP/s when training on rows of these lengths took ``delta_time`` seconds."""
        achieved = self.training_flops(batch_seqlens, head_tokens) / delta_time / 1e12 if delta_time > 0 else 0.0
        return achieved, get_device_flops("T")
