"""The weights of a small Qwen2 model in a larger shape that computes the same function.

In the manner of Net2Net (Chen et al. 2016), with zeros in place of split copies. Adam moves every weight that has a
gradient by about the learning rate, however small the gradient; a construction whose new weights have gradients is
therefore taken apart within a few steps. Here what is new has a gradient of exactly zero, so it stays as it is, and the
wide model learns what the small one would:

- The residual stream holds the small model's values in its first d dimensions, one constant, and zeros up to D.
  Nothing writes to the zeros, and what the small model is made of does not read them.
- RMSNorm divides by the mean square over all dimensions, which zeros make smaller: its weights are multiplied by
  sqrt(d / D). The epsilon becomes (eps d - constant^2) / D, which takes the constant out of the sum again. It is
  negative where the constant is larger than the old epsilon; every sum of squares is well above that.
- A head's dimension i goes to i times the ratio of head sizes within its half, where the rotary embedding turns at the
  same frequency; queries are multiplied by the root of that ratio, which the larger head's scale takes away again.
- Query heads keep their key-value head. New queries, keys and gates are computed with random weights; new values and
  up-projections read only the zeros and are multiplied into what those give; they write with zeros. Whole layers too.
  The exception are new query heads on an old key-value head: they average real values, so that their zeros in o_proj
  learn, as those of as many heads would in any model.
- Vocabulary rows that the tokenizer does not know are never sampled: the final norm lets the constant through, with its
  sign turned, and their rows give it weight. To read such a token makes them less likely still. The rows have the norm
  of ordinary ones or a few times that. Embeddings stay tied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Qwen2Config

UNUSED_MARGIN = 40.0  # how far below the best logit those of rows without a token are, at every position measured
UNUSED_RATIO = 8.0  # of the constant in their rows to that in the others


@dataclass(frozen=True)
class WideShape:
    """The shape to widen to; Qwen2.5-1.5B's by default. ``positions`` is the longest context."""

    hidden: int = 1536
    layers: int = 28
    heads: int = 12
    kv_heads: int = 2
    intermediate: int = 8960
    vocabulary: int = 151_936
    positions: int = 32_768

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def check_shapes(small: Qwen2Config, shape: WideShape) -> None:
    """Whether the small model fits into the shape.

    Raises:
        ValueError: it does not, or it has a part that this construction does not cover.
    """
    if small.model_type != "qwen2" or not small.tie_word_embeddings:
        raise ValueError(
            f"--small: a Qwen2 model with tied embeddings is wanted, this one has model_type={small.model_type} and "
            f"tie_word_embeddings={small.tie_word_embeddings}"
        )
    rope = small.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or small.use_sliding_window:
        raise ValueError("--small: rotary scaling and sliding windows cannot be widened; take a model without them")
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise ValueError(
            f"--hidden {shape.hidden} has to be a multiple of --heads {shape.heads}, "
            f"and that of --kv_heads {shape.kv_heads}"
        )
    sizes = {
        "--hidden": (small.hidden_size + 1, shape.hidden),  # one dimension for the constant
        "--layers": (small.num_hidden_layers, shape.layers),
        "--kv_heads": (small.num_key_value_heads, shape.kv_heads),
        "--intermediate": (small.intermediate_size, shape.intermediate),
        "--vocabulary": (small.vocab_size, shape.vocabulary),
        "--positions": (small.max_position_embeddings, shape.positions),
    }
    for flag, (least, given) in sizes.items():
        if given < least:
            raise ValueError(f"{flag} {given} is smaller than the small model needs; give at least {least}")
    group, wide_group = small.num_attention_heads // small.num_key_value_heads, shape.heads // shape.kv_heads
    if wide_group < group:
        raise ValueError(
            f"--heads {shape.heads} over --kv_heads {shape.kv_heads} gives {wide_group} query heads to a key-value "
            f"head, and the small model has {group}; give --heads {group * shape.kv_heads} or more"
        )
    head_dim = small_head_dim(small)
    if shape.head_dim % head_dim or head_dim % 2:
        raise ValueError(
            f"--hidden {shape.hidden} over --heads {shape.heads} gives heads of {shape.head_dim}, which is no multiple "
            f"of the small model's {head_dim}: the rotary frequencies would differ"
        )


def small_head_dim(config: Qwen2Config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Widening:
    """The wide config and its weights, one tensor at a time.

    Args:
        small: the small model's config.
        weights: its parameters by name.
        shape: what to widen to.
        reach: the largest (UNUSED_MARGIN - best logit) times root mean square of the residual stream before the final
            norm over the positions measured.
        seed: of the random weights.

    Raises:
        ValueError: see :func:`check_shapes`; or a vocabulary row is zero.
    """

    def __init__(
        self,
        small: Qwen2Config,
        weights: dict[str, torch.Tensor],
        shape: WideShape,
        reach: float = 40.0,
        seed: int = 0,
    ) -> None:
        check_shapes(small, shape)
        self.small, self.weights, self.shape = small, weights, shape
        self.generator = torch.Generator().manual_seed(seed)
        self.width = small.hidden_size
        self.shrink = math.sqrt(self.width / shape.hidden)
        shortest = float(weights["model.embed_tokens.weight"].norm(dim=1).min())
        if not shortest:
            raise ValueError("--small: a row of its embeddings is zero, next to which no constant is small")
        # Exact in bfloat16, and its square is below the square sum of every row.
        self.constant = 2.0 ** math.floor(math.log2(shortest))
        self.unused = UNUSED_RATIO * self.constant
        self.constant_weight = -reach / (self.constant * (self.unused - self.constant))
        self._place_heads()

    def _place_heads(self) -> None:
        """Rows of the wide projections that hold the small heads' dimensions, in the small model's order."""
        small, wide = self.small, self.shape
        head_dim = small_head_dim(small)
        stride = wide.head_dim // head_dim
        first_half = torch.arange(head_dim // 2) * stride
        within = torch.cat([first_half, first_half + wide.head_dim // 2])  # (head_dim of the small model,)
        group = small.num_attention_heads // small.num_key_value_heads
        wide_group = wide.heads // wide.kv_heads
        heads = [(head // group) * wide_group + head % group for head in range(small.num_attention_heads)]
        self.query_rows = torch.cat([head * wide.head_dim + within for head in heads])
        self.kv_rows = torch.cat([head * wide.head_dim + within for head in range(small.num_key_value_heads)])
        self.query_scale = math.sqrt(stride)

    def config(self) -> Qwen2Config:
        """The wide model's config: the shape's sizes, everything else as in the small one."""
        values = copy.deepcopy(self.small.to_dict())
        for stale in ("layer_types", "head_dim", "transformers_version"):
            values.pop(stale, None)
        shape = self.shape
        values.update(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            max_window_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.positions,
            rms_norm_eps=(self.small.rms_norm_eps * self.width - self.constant**2) / shape.hidden,
        )
        return Qwen2Config(**values)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, float32 tensor) of every parameter of the wide model; the tied head is left out."""
        yield "model.embed_tokens.weight", self._embedding()
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}."
            parts = self._small_layer(prefix) if layer < self.small.num_hidden_layers else {}
            for name, tensor in self._layer(parts):
                yield prefix + name, tensor
        norm = self._norm(self.weights["model.norm.weight"])
        norm[self.width] = self.constant_weight * self.shrink
        yield "model.norm.weight", norm

    def _small_layer(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}

    def _embedding(self) -> torch.Tensor:
        table = torch.zeros(self.shape.vocabulary, self.shape.hidden)
        used = self.small.vocab_size
        table[:used, : self.width] = self.weights["model.embed_tokens.weight"]
        table[:used, self.width] = self.constant
        table[used:, self.width] = self.unused
        return table

    def _norm(self, weight: torch.Tensor | None) -> torch.Tensor:
        """A norm that does not let the constant through."""
        wide = torch.ones(self.shape.hidden)
        if weight is not None:
            wide[: self.width] = weight
        wide[self.width] = 0.0
        return wide * self.shrink

    def _random(self, rows: int) -> torch.Tensor:
        """(rows, hidden) weights that read every dimension."""
        size = (rows, self.shape.hidden)
        return torch.empty(size).normal_(0.0, self.small.initializer_range, generator=self.generator)

    def _silent(self, rows: int) -> torch.Tensor:
        """(rows, hidden) weights that read only what is zero."""
        weight = self._random(rows)
        weight[:, : self.width] = 0.0
        return weight

    def _layer(self, small: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """One layer's parameters; with no small layer to hold it changes nothing in the residual stream."""
        yield "input_layernorm.weight", self._norm(small.get("input_layernorm.weight"))
        yield "post_attention_layernorm.weight", self._norm(small.get("post_attention_layernorm.weight"))
        yield from self._attention(small)
        yield from self._mlp(small)

    def _attention(self, small: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        shape, width = self.shape, self.width
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            size = heads * shape.head_dim
            weight = self._silent(size) if name == "v" else self._random(size)
            bias = torch.zeros(size)
            if small:
                rows, scale = (self.query_rows, self.query_scale) if name == "q" else (self.kv_rows, 1.0)
                if name != "v":
                    self._keep_to_old_keys(weight, name)
                weight[rows] = 0.0
                weight[rows, :width] = small[f"self_attn.{name}_proj.weight"] * scale
                bias[rows] = small[f"self_attn.{name}_proj.bias"] * scale
            yield f"self_attn.{name}_proj.weight", weight
            yield f"self_attn.{name}_proj.bias", bias
        output = torch.zeros(shape.hidden, shape.heads * shape.head_dim)
        if small:
            output[:width, self.query_rows] = small["self_attn.o_proj.weight"]
        yield "self_attn.o_proj.weight", output

    def _keep_to_old_keys(self, weight: torch.Tensor, name: str) -> None:
        """On the small model's key-value heads new dimensions are zero, and new query heads read its values alone."""
        heads = self.small.num_key_value_heads
        if name == "q":
            heads *= self.shape.heads // self.shape.kv_heads
        size = self.shape.head_dim
        old = torch.zeros(size, dtype=torch.bool)
        old[self.kv_rows[: small_head_dim(self.small)]] = True
        old = old.repeat(heads)  # (rows of these heads,)
        part = weight[: len(old)]
        part[~old, : self.width] = 0.0
        part[old, self.width :] = 0.0

    def _mlp(self, small: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        units = self.small.intermediate_size
        for name, draw in (("gate_proj", self._random), ("up_proj", self._silent)):
            weight = draw(self.shape.intermediate)
            if small:
                weight[:units] = 0.0
                weight[:units, : self.width] = small[f"mlp.{name}.weight"]
            yield f"mlp.{name}.weight", weight
        down = torch.zeros(self.shape.hidden, self.shape.intermediate)
        if small:
            down[: self.width, :units] = small["mlp.down_proj.weight"]
        yield "mlp.down_proj.weight", down
