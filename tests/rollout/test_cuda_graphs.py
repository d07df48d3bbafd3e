"""Sizes of CUDA graphs: what vLLM asks of such a list, and how much a step is padded."""

from __future__ import annotations

import bisect

import pytest

from verl.workers.rollout.cuda_graphs import graph_sizes


@pytest.mark.parametrize("limit", [1, 3, 100, 512, 1000, 2048, 8192, 16384])
def test_sizes_ascend_from_one_request_to_what_a_step_may_hold(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes[0] == 1 and sizes == sorted(set(sizes)) and sizes[-1] <= limit
    assert set(sizes) == {size for size in graph_sizes(1 << 20) if size <= limit}


def test_a_step_is_padded_by_half_at_most() -> None:
    sizes = graph_sizes(8192)
    for tokens in range(1, sizes[-1] + 1):
        padded = sizes[bisect.bisect_left(sizes, tokens)]
        assert padded - tokens < max(8, tokens / 2)
        if 128 < tokens <= 512:  # decoding requests: what is padded costs as much as a request
            assert padded - tokens < tokens / 8


@pytest.mark.parametrize("requests", [1, 4, 5, 64, 84, 200, 512, 5000])
def test_only_steps_of_as_many_requests_as_expected_are_padded_little(requests: int) -> None:
    every, sizes = graph_sizes(8192), graph_sizes(8192, requests)
    top = bisect.bisect_left(every, requests)
    if requests <= 512:
        assert sizes[: top + 1] == every[: top + 1]  # decode steps of up to so many requests
        assert sizes[top + 1 :] == [size for size in (128, 256, 512) if size > every[top]] + every[-9:]
    else:
        assert sizes == every


def test_vllm_takes_the_list_as_it_is() -> None:
    compilation = pytest.importorskip("vllm.config").CompilationConfig
    sizes = graph_sizes(8192)
    assert compilation(cudagraph_capture_sizes=sizes).cudagraph_capture_sizes == sizes
