"""What a packed forward returns: log-probabilities of a language model, values of a critic.

Both replace ``forward`` on the model object itself, so the call still passes through the module's own hooks. FSDP2
gathers the root's parameters there (embedding, final norm, output embedding), and the chunked head uses the gathered
``lm_head.weight`` directly, tied or not. Without ``predict_index`` the original forward runs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from verl.models.logprobs import token_log_probs
from verl.models.packing import PackedRows

VALUE_HEAD = "score"  # what transformers calls the head of a classification model


def install_log_prob_head(model: nn.Module) -> nn.Module:
    """Teach a causal language model of transformers the packed log-probability forward; returns the model."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} needs an output embedding without bias; choose another model.path")
    plain_forward = model.forward

    def forward(self: nn.Module, *args: Any, predict_index: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if predict_index is None:
            return plain_forward(*args, **kwargs)
        labels = kwargs.pop("labels")
        temperature = kwargs.pop("temperature", 1.0)
        with_entropy = kwargs.pop("with_entropy", True)
        hidden = getattr(self, self.base_model_prefix)(**kwargs).last_hidden_state[0]
        weight = self.get_output_embeddings().weight
        return token_log_probs(hidden[predict_index].to(weight.dtype), weight, labels, temperature, with_entropy)

    model.forward = types.MethodType(forward, model)
    return model


def install_value_head(model: nn.Module) -> nn.Module:
    """Teach a classification model with one label the packed value forward; returns the model.

    Raises:
        ValueError: its head is not the one linear layer that transformers gives decoder models.
    """
    if not isinstance(getattr(model, VALUE_HEAD, None), nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear {VALUE_HEAD!r} head; choose another model.path")
    plain_forward = model.forward

    def forward(self: nn.Module, *args: Any, predict_index: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if predict_index is None:
            return plain_forward(*args, **kwargs)
        hidden = getattr(self, self.base_model_prefix)(**kwargs).last_hidden_state[0]
        head = getattr(self, VALUE_HEAD)
        values = head(hidden[predict_index].to(head.weight.dtype))
        return values.float().flatten().clone()  # FSDP hooks its outputs, which must not be views

    model.forward = types.MethodType(forward, model)
    return model


def forward_log_probs(
    model: nn.Module, packed: PackedRows, temperature: float, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of all response tokens of a micro-batch, both ``(M,)`` float32."""
    return model(
        **packed.model_inputs(),
        predict_index=packed.predict_index,
        labels=packed.labels,
        temperature=temperature,
        with_entropy=with_entropy,
    )


def forward_values(model: nn.Module, packed: PackedRows) -> torch.Tensor:
    """Value of the state before each response token, ``(M,)`` float32."""
    return model(**packed.model_inputs(), predict_index=packed.predict_index)


def forward_row_scores(model: nn.Module, packed: PackedRows) -> torch.Tensor:
    """What the head says at the last token of each row, ``(B,)`` float32."""
    return model(**packed.model_inputs(), predict_index=packed.cu_seqlens[1:].long() - 1)
