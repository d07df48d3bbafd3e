"""Log-probabilities and entropies straight from hidden states, a chunk of tokens at a time.

The full ``(tokens, vocabulary)`` matrix never exists, forward or backward: each chunk's logits are made, used and
dropped, and made again in the backward pass. With logits ``z = h W^T / temperature``, ``p = softmax(z)``,
``log p_y = z_y - logsumexp(z)`` and ``H = logsumexp(z) - sum_j p_j z_j``, the gradient of
``g_l * log p_y + g_h * H`` is ``g_l (1[j=y] - p_j) - g_h p_j (log p_j + H)`` for logit ``j``.
"""

from __future__ import annotations

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
            f"log-probabilities need a positive temperature, got {temperature}; set actor_rollout_ref.rollout.temperature"
        )
    return _ChunkedLogProbs.apply(hidden, weight, labels, 1.0 / temperature, with_entropy)


def _chunk_size(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    elements = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cpu"])
    return max(64, elements // weight.shape[0] // 64 * 64)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


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
        log_probs = hidden.new_zeros(count, dtype=torch.float32)
        log_norm = hidden.new_zeros(count, dtype=torch.float32)
        entropy = hidden.new_zeros(count, dtype=torch.float32)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale)
            log_norm[part] = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, labels[part, None])[:, 0] - log_norm[part]
            if with_entropy:
                probs = torch.exp(logits - log_norm[part, None])
                entropy[part] = log_norm[part] - torch.linalg.vecdot(probs, logits)
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
            log_p = _logits(hidden[part], weight, ctx.scale).sub_(log_norm[part, None])
            grad = torch.exp(log_p)  # becomes the gradient of the logits in place
            if grad_entropy is None:
                grad.mul_(-grad_log_probs[part, None])
            else:
                log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_probs[part, None])
                grad.mul_(log_p).neg_()
            grad.scatter_add_(1, labels[part, None], grad_log_probs[part, None])
            grad = grad.mul_(ctx.scale).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
