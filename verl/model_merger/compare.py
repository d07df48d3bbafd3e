"""How two models differ, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class Difference:
    """What ``compare`` found.

    Attributes:
        tensors: names that both have.
        changed: name → largest absolute difference, of those with any.
        only_first, only_second: names that one of them lacks.
        reshaped: names whose shapes differ.
        changed_elements, elements: counts over the tensors that both have in one shape.
        relative: norm of all differences by the norm of the second's tensors.
    """

    tensors: int = 0
    changed: dict[str, float] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    changed_elements: int = 0
    elements: int = 0
    relative: float = 0.0

    @property
    def same_names(self) -> bool:
        return not (self.only_first or self.only_second or self.reshaped)

    @property
    def none(self) -> bool:
        """Whether the two are the same model."""
        return self.same_names and not self.changed

    def describe(self) -> str:
        """One line of figures."""
        parts = [f"{len(self.changed)} of {self.tensors} tensors differ"]
        if self.changed:
            name = max(self.changed, key=lambda key: self.changed[key])
            parts.append(f"in {self.changed_elements} of {self.elements} elements")
            parts.append(f"by {self.relative:.3g} of the weights' norm")
            parts.append(f"at most by {self.changed[name]:.3g} ({name})")
        for names, what in (
            (self.only_first, "only in the first"),
            (self.only_second, "only in the second"),
            (self.reshaped, "of another shape"),
        ):
            if names:
                parts.append(f"{len(names)} {what} ({names[0]})")
        return ", ".join(parts)


@torch.no_grad()
def compare(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], atol: float = 0.0) -> Difference:
    """Differences beyond ``atol``, after casting ``second`` to the dtype of ``first``.

    The cast makes a mere change of dtype no difference. NaN differs from everything.
    """
    found = Difference(
        only_first=[name for name in first if name not in second],
        only_second=[name for name in second if name not in first],
    )
    squares, scale = 0.0, 0.0
    for name, tensor in first.items():
        if name not in second:
            continue
        found.tensors += 1
        if second[name].shape != tensor.shape:
            found.reshaped.append(name)
            continue
        reference = second[name].to(tensor.dtype).float()
        gap = (tensor.float() - reference).abs()
        beyond = ~(gap <= atol)
        found.elements += tensor.numel()
        squares += float(gap.square().sum(dtype=torch.float64))
        scale += float(reference.square().sum(dtype=torch.float64))
        if beyond.any():
            found.changed[name] = float(gap.max())
            found.changed_elements += int(beyond.sum())
    found.relative = math.sqrt(squares / scale) if scale else math.inf if squares else 0.0
    return found
