"""Helpers of verl-agent's rollout module, for code written against it.

The trainer itself completes batches with rows of zero weight (``verl.trainer.ppo.batching``) and replaces groups
without a learning signal while the rollout runs; ``adjust_batch`` and ``filter_group_data`` do so after the fact.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from verl.protocol import DataProto
from verl.trainer.config.group_size import group_size

logger = logging.getLogger(__name__)


def to_list_of_dict(batch: DataProto) -> list[dict[str, Any]]:
    """The rows of ``batch`` as dicts, tensors and columns together."""
    tensors = dict(batch.batch.items()) if batch.batch is not None else {}
    columns = {**tensors, **batch.non_tensor_batch}
    return [{key: values[row] for key, values in columns.items()} for row in range(len(batch))]


def torch_to_numpy(tensor: torch.Tensor | np.ndarray, is_object: bool = False) -> np.ndarray:
    """``tensor`` as an array; ``is_object`` gives an object array of the same shape.

    Raises:
        ValueError: neither a tensor nor an array.
    """
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().numpy()
    elif not isinstance(tensor, np.ndarray):
        raise ValueError(f"expected a tensor or an array, not {type(tensor).__name__}")
    return tensor.astype(object) if is_object else tensor


def numpy_to_torch(array: np.ndarray | torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """``array`` as a tensor on ``device``.

    Raises:
        ValueError: neither a tensor nor an array.
    """
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(array)
    elif not isinstance(array, torch.Tensor):
        raise ValueError(f"expected a tensor or an array, not {type(array).__name__}")
    return array.to(device)


def process_image(
    image: torch.Tensor | np.ndarray, max_pixels: int = 2048 * 2048, min_pixels: int = 256 * 256
) -> Image.Image:
    """An RGB image whose area lies between ``min_pixels`` and ``max_pixels``, from pixels in [0, 1] or [0, 255]."""
    pixels = torch_to_numpy(image)
    if pixels.max() < 1:
        pixels = pixels * 255.0
    picture = Image.fromarray(pixels.astype(np.uint8))
    area = picture.width * picture.height
    bound = min(max(area, min_pixels), max_pixels)
    if bound != area:
        factor = math.sqrt(bound / area)
        picture = picture.resize((int(picture.width * factor), int(picture.height * factor)))
    return picture.convert("RGB")


def batch_divisor(config: Any) -> int:
    """What the number of rows has to be a multiple of: micro-batch sizes over all ranks, those that are set."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    model = config.actor_rollout_ref
    sizes = (
        model.ref.log_prob_micro_batch_size_per_gpu,
        model.rollout.log_prob_micro_batch_size_per_gpu,
        model.actor.ppo_micro_batch_size_per_gpu,
    )
    return math.lcm(ranks, *(size * ranks for size in sizes if size))


def adjust_batch(config: Any, data: DataProto, mode: Literal["copy", "delete"] = "copy") -> DataProto:
    """Makes the number of rows a multiple of ``batch_divisor(config)``.

    Args:
        mode: ``copy`` appends randomly chosen rows again, each as few times as possible; ``delete`` drops randomly
            chosen rows and keeps the order of the others. The choice draws from NumPy's global generator.

    Raises:
        ValueError: another mode.
    """
    rows, divisor = len(data), batch_divisor(config)
    excess = rows % divisor
    if mode not in ("copy", "delete"):
        raise ValueError(f"mode is copy or delete, not {mode!r}")
    if excess == 0:
        return data
    if mode == "delete":
        dropped = np.random.choice(rows, excess, replace=False)
        return data.select_idxs(np.setdiff1d(np.arange(rows), dropped))
    missing = divisor - excess
    rounds = [np.random.permutation(rows) for _ in range(missing // rows)]
    chosen = np.concatenate([*rounds, np.random.choice(rows, missing % rows, replace=False)])
    return DataProto.concat([data, data.select_idxs(chosen)])


def filter_group_data(
    batch_list: list[list[dict[str, Any]]],
    episode_rewards: np.ndarray,
    episode_lengths: np.ndarray,
    success: dict[str, np.ndarray],
    traj_uid: np.ndarray,
    tool_callings: np.ndarray,
    config: Any,
    last_try: bool = False,
) -> tuple[list[list[dict[str, Any]]], np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Drops the groups all of whose episodes have the same reward (dynamic sampling, DAPO, arXiv 2503.14476, eq. 11).

    Args:
        batch_list: the rows of each episode; groups are ``env.rollout.n`` consecutive episodes.
        last_try: keep everything.

    Returns:
        The first six arguments without those groups; success figures that are not one per episode are left out.
    """
    if last_try:
        return batch_list, episode_rewards, episode_lengths, success, traj_uid, tool_callings
    size = group_size(config)
    if size == 1:
        logger.warning("groups of one episode never differ: algorithm.filter_groups.enable needs env.rollout.n > 1")
    rewards = np.asarray(episode_rewards).reshape(-1, size)
    differs = (rewards != rewards[:, :1]).any(axis=1)
    keep = np.flatnonzero(np.repeat(differs, size))
    kept_success = {name: values[keep] for name, values in success.items() if len(values) == len(batch_list)}
    kept_rows = [batch_list[index] for index in keep]
    return kept_rows, episode_rewards[keep], episode_lengths[keep], kept_success, traj_uid[keep], tool_callings[keep]
