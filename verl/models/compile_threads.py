"""How many kernels torch.compile builds at a time."""

from __future__ import annotations

import os

_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"


def share_compile_threads(ranks: int) -> int:
    """Build as many kernels at a time as this rank's share of the cores; returns that number.

    Importing vLLM sets it to one for the process, for the sake of engines with processes of their own, and the layers'
    kernels of the first update would be built one after the other. ``TORCHINDUCTOR_COMPILE_THREADS`` decides where it
    is set. Call it when the engine is built, whose own compilation stays as vLLM wants it. The processes that build
    start here: each imports torch first, and until they are ready torch would build what is asked for by itself.

    Args:
        ranks: processes that share the machine's cores.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    threads = config.decide_compile_threads()
    config.compile_threads = threads if _VARIABLE in os.environ else max(1, threads // ranks)
    AsyncCompile.use_process_pool()  # asks whether they are ready, which starts them
    return config.compile_threads
