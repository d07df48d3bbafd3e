"""How an update's micro-batches are cut and how many layers recompute their activations, given the memory there is.

Two things cost time: layers that are recomputed in the backward pass, and micro-batches, as a GPU waits while its host
launches the kernels of each. Fewer and larger micro-batches need more memory, and so more recomputed layers. A third
is the reduction of gradients, which takes time in every micro-batch or memory until a step's last. Costs are counted in
tokens, by the time that an update needs for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Recomputing is one forward pass more, of three that forward and backward amount to.
RECOMPUTED = 1 / 3

# What launching the kernels of a micro-batch costs, in parameters x tokens a layer: 1.3 G parameters in 28 layers are
# worth some 2,500 tokens on an H200 (1,400 to 4,700, depending on the host).
_LAUNCHES = 1.2e11

# Share of an optimiser step's time that each reduction of its gradients beyond the first costs.
_REDUCTION = 0.03

# Micro-batches are made smaller by these factors, and from there on by another again and again, down to so many tokens.
_FACTORS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8)
_FURTHER = 4 / 3
LEAST_TOKENS = 2048

Sizes = Sequence[Sequence[int]]  # tokens of each micro-batch of each optimiser step


@dataclass(frozen=True)
class UpdateMemory:
    """What an update of a model takes beside weights, full gradients and the optimiser's state, in bytes.

    Attributes:
        layers: decoder layers.
        kept: that a token leaves behind in a layer.
        inputs: that a token leaves behind in a layer which is recomputed.
        fixed: whatever the number of tokens: the output head, and weights and gradients of the layers at work.
        may_recompute: whether layers can be recomputed at all.
    """

    layers: int
    kept: float
    inputs: float
    fixed: float
    may_recompute: bool = True

    def needed(self, tokens: int, recomputed: int) -> float:
        """Bytes for a micro-batch. The layer whose backward pass runs holds its activations and their gradients."""
        at_work = 2 * self.kept
        return self.fixed + tokens * (at_work + (self.layers - recomputed) * self.kept + recomputed * self.inputs)

    def recomputed(self, tokens: int, free: float) -> int:
        """Layers that must be recomputed so that a micro-batch fits; all of them, where not even that is enough."""
        if not self.may_recompute:
            return 0
        excess = self.needed(tokens, 0) - free
        saved = tokens * (self.kept - self.inputs)
        return min(self.layers, max(0, -int(-excess // max(saved, 1.0))))


def launch_tokens(layers: int, layer_parameters: int) -> float:
    """Tokens that an update could process while the host launches one more micro-batch.

    Args:
        layer_parameters: of all layers together, as far as a token passes through them.
    """
    return _LAUNCHES * layers / max(layer_parameters, 1)


def cheapest_way(
    sizes: Sizes, memory: UpdateMemory, free: float, unreduced: float, launches: float
) -> tuple[float, bool]:
    """What an update costs, and whether its gradients are better reduced in every micro-batch.

    The alternative keeps ``unreduced`` bytes of them in full size until a step's last micro-batch. That saves
    reductions, but takes memory, for which layers are recomputed.

    Args:
        sizes: tokens of each micro-batch of each optimiser step.
        free: bytes that the update may take, full gradients included.
        unreduced: bytes of full gradients beyond those at work; 0 where they are not kept, or reduced anyway.
        launches: see ``launch_tokens``.

    Returns:
        Tokens' worth of time, beyond all others where a micro-batch does not fit; the choice, False if it is free.
    """
    waiting = _cost(sizes, memory, free - unreduced, launches)
    if unreduced <= 0:
        return waiting, False
    reducing = _cost(sizes, memory, free, launches) + _REDUCTION * sum((len(step) - 1) * sum(step) for step in sizes)
    return min(waiting, reducing), reducing < waiting


def _cost(sizes: Sizes, memory: UpdateMemory, free: float, launches: float) -> float:
    largest = largest_of(sizes)
    recomputed = memory.recomputed(largest, free)
    missing = memory.needed(largest, recomputed) - free
    if missing > 0:
        return 1e15 + missing
    return sum(map(sum, sizes)) * (1 + RECOMPUTED * recomputed / memory.layers) + launches * sum(map(len, sizes))


def largest_of(sizes: Sizes) -> int:
    """Tokens of the largest micro-batch; 0 where there is none."""
    return max((tokens for step in sizes for tokens in step), default=0)


def costs_by_limit(
    limit: int,
    split: Callable[[int], Sizes],
    memory: UpdateMemory,
    free: float,
    unreduced: float,
    launches: float,
) -> tuple[list[int], list[float]]:
    """Limits of tokens from ``limit`` down, and what an update costs with each; see ``cheapest_way``.

    Args:
        split: the micro-batches, were they filled up to so many tokens.
    """
    limits = [int(limit / factor) for factor in _FACTORS if factor == 1 or limit / factor >= LEAST_TOKENS]
    while len(limits) >= len(_FACTORS) and limits[-1] > LEAST_TOKENS:
        limits.append(max(LEAST_TOKENS, int(limits[-1] / _FURTHER)))
    return limits, [cheapest_way(split(tokens), memory, free, unreduced, launches)[0] for tokens in limits]
