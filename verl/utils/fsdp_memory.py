"""Bytes that FSDP2 takes on a device during an update, beside a rank's shards of weights, gradients and moments.

What is alive when is read in torch 2.13's ``torch/distributed/fsdp/_fully_shard``: ``_fsdp_param_group.py``,
``_fsdp_collectives.py`` and ``_fsdp_state.py``. Left out is the padding of weights whose first dimension the ranks do
not divide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.utils.fsdp_utils import ShardingOptions, decoder_layers


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of weights that stay gathered during an update beside their shards; 0 for a model that frees them."""
    options = getattr(model, "sharding_options", None)
    if options is None or options.reshard_after_forward:
        return 0
    return _gathered(model.parameters(), options)


def gathered_root_bytes(model: nn.Module) -> int:
    """Bytes of the root's weights, which every forward gathers until its backward; 0 if ``gathered_bytes`` has them."""
    options = getattr(model, "sharding_options", None)
    if options is None or not options.reshard_after_forward:
        return 0
    return _gathered(_root_and_layers(model, 0), options)


def unreduced_bytes(model: nn.Module) -> int:
    """Bytes of full gradients that an update keeps until it reduces them; 0 for a model that does so at once."""
    options = getattr(model, "sharding_options", None)
    if options is None or not options.reduce_once or dist.get_world_size() == 1:
        return 0
    return _reduced(model.parameters(), options)


def reduction_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of the root and two layers, or of a small model as a whole, in the dtype in which FSDP
    reduces them over ranks: what a model with ``reduce_once`` needs if it reduces in every micro-batch instead. 0 for a
    single rank that adds them up there."""
    options = getattr(model, "sharding_options", None)
    if options is None or (options.reduce_once and dist.get_world_size() == 1):
        return 0
    return _reduced(_root_and_layers(model, 2), options)


def working_bytes(model: nn.Module) -> int:
    """Bytes that FSDP takes for the units at work in an update, at most while activations of layers are there.

    A model whose weights stay gathered (``gathered_bytes`` has these) holds gradients of the root and two layers, or of
    a small model as a whole, in the dtypes of compute and of reduction. One that gathers each unit anew, forward and
    backward, also has buffers for that: see ``_buffers``. 0 for a model that is not sharded.
    """
    options = getattr(model, "sharding_options", None)
    if options is None:
        return 0
    if options.reshard_after_forward:
        return _buffers(model, options)
    return _gradients(_root_and_layers(model, 2), options) + reduction_bytes(model)


@dataclass(frozen=True)
class _Unit:
    """Bytes of a unit in full size: weights and gradients in the dtype of compute, gradients in that of reduction."""

    weights: int
    gradients: int
    reduced: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], options: ShardingOptions) -> _Unit:
        parameters = list(parameters)
        return cls(_gathered(parameters, options), _gradients(parameters, options), _reduced(parameters, options))


def _buffers(model: nn.Module, options: ShardingOptions) -> int:
    """``working_bytes`` of a model whose layers are gathered and freed again, forward and backward.

    The caching allocator does not lend what it keeps for one stream to another, so the peaks of three streams add up.
    With ``w``, ``g`` and ``r`` the sizes of ``_Unit`` of the root (0) and of layers i, and each shard one of ``n``:

    * compute: ``w_0 + g_0 + max_i(w_i + g_i + r_{i+1})``. The root is gathered from the forward's start to the
      backward's end. Layer i's backward has its weights and makes its gradients, while the input of the reduction of
      layer i + 1 is kept until layer i's begins (``post_backward``, ``reduce_scatter_states``).
    * gathering, if ``n > 1``: ``max(w_0 (1 + 1/n), max(w_0, w) + w (1 + 1/n))`` with ``w`` the largest layer's. Shards
      are cast and gathered into one flat buffer (``foreach_all_gather``); in a forward the one before is still there
      (``AllGatherState``), also the root's when the first layer begins. In the backward it is the prefetched layer's.
    * reducing: the largest of all ``r / n`` (``foreach_reduce``), nothing where a single rank adds gradients up. With
      replicas of shards (HSDP) ``sum(r) / n``: each unit keeps it until the backward's end (``AllReduceState``).

    ``g_0`` lacks the input embedding, unless it is the output layer too. Its gradient, and the root's reduction, come
    when no layer's activations are left, and take no more than was there before.
    """
    layers = decoder_layers(model)
    units = [_Unit.of(layer.parameters(), options) for layer in layers]
    rest = _root_and_layers(model, 0)
    root = _Unit.of(rest, options)
    first = _Unit.of(rest - _last_to_get_gradients(model), options)
    shards, replicated = _layout(model)

    nexts = [unit.reduced for unit in units[1:]] + [0]
    compute = root.weights + first.gradients
    compute += max(unit.weights + unit.gradients + after for unit, after in zip(units, nexts))
    gathering = 0
    if shards > 1:
        layer = max(unit.weights for unit in units)
        copies = 1 + 1 / shards
        gathering = int(max(root.weights * copies, max(root.weights, layer) + layer * copies))
    reduced = [root.reduced, *(unit.reduced for unit in units)]
    reducing = (sum(reduced) if replicated else max(reduced)) // shards
    if options.reduce_once:  # a single rank: the outputs are the gradients that it keeps
        reducing = 0
    return compute + gathering + reducing


def _layout(model: nn.Module) -> tuple[int, bool]:
    """Ranks that share one copy of the model, and whether there are several copies."""
    mesh = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh
    return mesh.size(mesh.ndim - 1), mesh.ndim > 1


def _last_to_get_gradients(model: nn.Module) -> set[nn.Parameter]:
    """The input embedding's weights, unless an output layer shares them."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    return set() if tied else set(embedding.parameters())


def _root_and_layers(model: nn.Module, count: int) -> set[nn.Parameter]:
    """Parameters of the root and of the first ``count`` layers; all of a model whose layers are no units of FSDP."""
    units = [layer for layer in decoder_layers(model) if isinstance(layer, FSDPModule)]
    return set(model.parameters()) - {parameter for layer in units[count:] for parameter in layer.parameters()}


def _gathered(parameters: Iterable[nn.Parameter], options: ShardingOptions) -> int:
    return sum(p.numel() * (options.param_dtype or p.dtype).itemsize for p in parameters)


def _gradients(parameters: Iterable[nn.Parameter], options: ShardingOptions) -> int:
    return _gathered((p for p in parameters if p.requires_grad), options)


def _reduced(parameters: Iterable[nn.Parameter], options: ShardingOptions) -> int:
    trained = (p for p in parameters if p.requires_grad)
    return sum(p.numel() * (options.reduce_dtype or options.param_dtype or p.dtype).itemsize for p in trained)
