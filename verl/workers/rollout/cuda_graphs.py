"""For which numbers of tokens an engine captures CUDA graphs.

A step that also reads a prompt has hundreds to thousands of tokens. Without a graph of that size the host launches
every kernel of it, which takes longer than the kernels do: on an H200 with a model of 1.5 B a prompt of 1,000 tokens
costs 26 ms beside 64 requests, and 7 to 14 ms with one. From some 4,000 tokens on the device is the slower of the two.
"""

from __future__ import annotations

_DECODE_STEPS = ((8, 128), (16, 256), (32, 512))  # multiples of the first up to the second
_PREFILL_SIZES = (128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096)


def graph_sizes(max_num_batched_tokens: int, requests: int | None = None) -> list[int]:
    """Numbers of tokens, ascending; a step runs as the next larger one.

    Args:
        max_num_batched_tokens: what a step may hold; no size is beyond it.
        requests: how many the engine is expected to have at once: steps that decode more are as coarse as those that
            read prompts, since every size takes time and memory to capture. None: any number.
    """
    sizes = [1, 2, 4]
    for step, end in _DECODE_STEPS:
        sizes += range(sizes[-1] // step * step + step, end + 1, step)
    if requests is not None:
        sizes = [size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < requests]
    sizes += [size for size in _PREFILL_SIZES if size > sizes[-1]]
    return [size for size in sizes if size <= max_num_batched_tokens]
