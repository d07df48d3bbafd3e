"""Which steps of a task group saw the same state: GiGPO's step groups.

States are compared by hash, so that a million-pixel image costs one pass over its bytes; texts can also be joined by
similarity, which is slower and depends on the order of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from gigpo.groups import combine, factorize

logger = logging.getLogger(__name__)


def build_step_group(
    anchor_obs: np.ndarray,
    index: np.ndarray,
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    summarize: bool = False,
) -> np.ndarray:
    """Which rows saw the same state within the same task group.

    Args:
        anchor_obs: (N,) states. Equal states share a group; arrays (images) are compared by their bytes.
        index: (N,) task group of each row.
        enable_similarity: join texts whose similarity reaches `similarity_thresh` instead: each row joins the first
            existing step group whose first member it resembles (so the result depends on the order of rows).
        summarize: log how many step groups there are of each size.

    Returns:
        (N,) int64, the row's step group; groups of different tasks never share a number.

    Raises:
        ValueError: similarity asked for states that are not text, or a threshold outside (0, 1).
        TypeError: a state that cannot be compared.
    """
    tasks = factorize(index)
    if enable_similarity:
        check_similarity(anchor_obs, similarity_thresh)
        step_groups = similar_groups(anchor_obs, tasks, similarity_thresh)
    else:
        step_groups = combine(tasks, factorize(anchor_key(anchor) for anchor in anchor_obs))
    sizes = np.bincount(step_groups)
    if summarize:
        summarize_group_size(sizes.tolist())
    return step_groups


def check_similarity(anchor_obs: np.ndarray, threshold: float) -> None:
    """Raise `ValueError` where similarity grouping cannot work."""
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"algorithm.gigpo.similarity_thresh={threshold} must lie strictly between 0 and 1")
    if not all(isinstance(anchor, str) for anchor in anchor_obs):
        raise ValueError(
            "algorithm.gigpo.enable_similarity=True compares texts, and these anchors are none: set it to False"
        )


def similar_groups(anchor_obs: np.ndarray, tasks: np.ndarray, threshold: float) -> np.ndarray:
    """Greedy clustering within each task: (N,) codes. A text seen before goes where it went, without a comparison."""
    step_groups = np.empty(len(tasks), dtype=np.int64)
    founders: dict[int, list[tuple[str, int]]] = {}  # task -> (first member's text, step group) in order of founding
    known: dict[tuple[int, str], int] = {}
    count = 0
    for row, (task, text) in enumerate(zip(tasks.tolist(), anchor_obs, strict=True)):
        group = known.get((task, text))
        if group is None:
            group = first_similar(founders.setdefault(task, []), text, threshold)
            if group is None:
                group = count
                count += 1
                founders[task].append((text, group))
            known[(task, text)] = group
        step_groups[row] = group
    return step_groups


def first_similar(founders: Sequence[tuple[str, int]], text: str, threshold: float) -> int | None:
    """The first founder's group that `text` resembles, else None."""
    matcher = SequenceMatcher(None)
    matcher.set_seq2(text)  # the matcher keeps what it learns of the second text
    for founder, group in founders:
        matcher.set_seq1(founder)
        if reaches(matcher, threshold):
            return group
    return None


def are_similar(a: str, b: str, threshold: float = 0.95) -> bool:
    """Whether two texts' Ratcliff-Obershelp ratio reaches `threshold`. Raises `ValueError` for anything but text."""
    if not isinstance(a, str) or not isinstance(b, str):
        raise ValueError("similarity is defined for texts alone")
    return reaches(SequenceMatcher(None, a, b), threshold)


def reaches(matcher: SequenceMatcher, threshold: float) -> bool:
    """ratio() >= threshold, with its two cheap upper bounds asked first."""
    return all(ratio() >= threshold for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio))


def anchor_key(anchor: Any) -> Hashable:
    """A small hashable that is equal for equal states: numeric arrays become shape, type and a hash of their bytes.

    Python's own hash of bytes is 64 bits wide and keyed: among 50,000 images a collision has a chance of 1e-10. It is
    four times as fast as the fastest digest of hashlib.
    """
    if isinstance(anchor, str):
        return anchor
    if isinstance(anchor, np.ndarray) and anchor.dtype != object:
        return ("array", anchor.shape, anchor.dtype.str, hash(anchor.tobytes()))
    if isinstance(anchor, (list, tuple)):
        return tuple(anchor_key(item) for item in anchor)
    if isinstance(anchor, dict):
        return tuple(sorted((key, anchor_key(value)) for key, value in anchor.items()))
    return to_hashable(anchor)


def to_hashable(x: Any) -> Hashable:
    """A hashable of the same content: scalars as they are, arrays flattened to tuples, dicts as sorted pairs.

    Raises:
        TypeError: anything else.
    """
    if isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        return tuple(x.flatten().tolist())
    if isinstance(x, (list, tuple)):
        return tuple(to_hashable(item) for item in x)
    if isinstance(x, dict):
        return tuple(sorted((key, to_hashable(value)) for key, value in x.items()))
    raise TypeError(
        f"an anchor of type {type(x).__name__} cannot be compared: use text, numbers, arrays, lists and dicts"
    )


def summarize_group_size(group_size: list[int]) -> None:
    """Log how many groups there are of each size, and their mean size."""
    if not group_size:
        logger.info("step groups: none")
        return
    sizes, counts = np.unique(np.asarray(group_size), return_counts=True)
    shares = ", ".join(f"{count} of size {size}" for size, count in zip(sizes, counts, strict=True))
    logger.info("step groups: %d, mean size %.2f (%s)", len(group_size), float(np.mean(group_size)), shares)
