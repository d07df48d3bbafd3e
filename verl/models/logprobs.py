"""Log-probabilities and entropies straight from hidden states, a chunk of tokens at a time.

The full ``(tokens, vocabulary)`` matrix never exists, forward or backward: each chunk's logits are made, used and
dropped, and made again in the backward pass. With logits ``z = h W^T / temperature``, ``p = softmax(z)``,
``log p_y = z_y - logsumexp(z)`` and ``H = logsumexp(z) - sum_j p_j z_j``, the gradient of
``g_l * log p_y + g_h * H`` is ``g_l (1[j=y] - p_j) - g_h p_j (log p_j + H)`` for logit ``j``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Elements of one chunk of logits: 1 GiB of float32 on an accelerator, 16 MiB (about the cache) on a CPU.
_CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of each distribution, differentiable in ``hidden`` and ``weight``.

    Args:
        hidden: ``(M, hidden_size)`` states at the predicting positions.
        weight: ``(vocabulary, hidden_size)`` output embedding, same dtype as ``hidden``.
        labels: ``(M,)`` int64.
        temperature: divides the logits; must be positive.
        with_entropy: False skips the entropy, which is then returned as zeros without gradient.

    Returns:
        ``(log_probs, entropy)``, both ``(M,)`` float32.
    """
    if temperature <= 0:
        raise ValueError(
            f"log-probabilities need a positive temperature, got {temperature}: set "
            "actor_rollout_ref.rollout.temperature"
        )
    return _ChunkedLogProbs.apply(hidden, weight, labels, 1.0 / temperature, with_entropy)


def _chunk_size(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    elements = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cpu"])
    return max(64, elements // weight.shape[0] // 64 * 64)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden @ weight.T`` in float32; on CUDA the product of bf16 operands is never rounded to bf16."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def _statistics(
    logits: torch.Tensor, labels: torch.Tensor, scale: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(log_probs, logsumexp, entropy)`` of a chunk, each ``(n,)``; overwrites ``logits`` ``(n, V)``."""
    logits = logits.mul_(scale)
    log_norm = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(1, labels[:, None])[:, 0] - log_norm
    if not with_entropy:
        return log_probs, log_norm, torch.zeros_like(log_norm)
    probs = torch.exp(logits - log_norm[:, None])
    return log_probs, log_norm, log_norm - (probs * logits).sum(dim=-1)


def _logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: float,
    log_norm: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of a chunk's logits ``(n, V)`` in ``dtype``; overwrites ``logits``."""
    log_p = logits.mul_(scale).sub_(log_norm[:, None])
    grad = torch.exp(log_p)
    if grad_entropy is None:
        grad = grad.mul_(-grad_log_probs[:, None])
    else:
        inner = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad = grad.mul_(inner).neg_()
    grad = grad.scatter_add_(1, labels[:, None], grad_log_probs[:, None])
    return grad.mul_(scale).to(dtype)


_compiled: dict[str, Callable] = {}
_COMPILED_ON = {"cuda"}


def enable_compiled_head() -> None:
    """Fuse the element-wise passes over a chunk's logits with torch.compile, on CUDA, from now on in this process."""
    for function in (_statistics, _logits_gradient):
        _compiled.setdefault(function.__name__, torch.compile(function, dynamic=True))


def _kernel(function: Callable, chunk: torch.Tensor) -> Callable:
    """The compiled function where there is one. A single token would be compiled for by itself, and is not worth it."""
    worth_it = chunk.device.type in _COMPILED_ON and len(chunk) > 1
    return _compiled.get(function.__name__, function) if worth_it else function


def _chunk_of(part: slice, *vectors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of parts of vectors: compiled code is checked against what an input is a view of, and where in it."""
    return [vector[part].clone(memory_format=torch.contiguous_format) for vector in vectors]


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, chunk = hidden.shape[0], _chunk_size(hidden, weight)
        log_probs, log_norm, entropy = (hidden.new_zeros(count, dtype=torch.float32) for _ in range(3))
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            (labels_here,) = _chunk_of(part, labels)
            statistics = _kernel(_statistics, labels_here)
            values = statistics(_logits(hidden[part], weight), labels_here, scale, with_entropy)
            log_probs[part], log_norm[part], entropy[part] = values
        ctx.save_for_backward(hidden, weight, labels, log_norm, entropy)
        ctx.scale, ctx.with_entropy = scale, with_entropy
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, labels, log_norm, entropy = ctx.saved_tensors
        if not ctx.with_entropy:
            grad_entropy = None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_norm)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        chunk = _chunk_size(hidden, weight)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            labels_here, *rest = _chunk_of(part, labels, log_norm, entropy, grad_log_probs)
            rest += [None] if grad_entropy is None else _chunk_of(part, grad_entropy)
            gradient = _kernel(_logits_gradient, labels_here)
            grad = gradient(_logits(hidden[part], weight), labels_here, ctx.scale, *rest, hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
