"""Python's garbage collector, told what stays.

The libraries of a rank are a million objects that live as long as the process. While they are imported the collector
looks through all of them again and again, and every full collection later does so once more: vLLM asks for several
while it builds an engine.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def made_to_stay() -> Iterator[None]:
    """Around imports: nothing is collected meanwhile, and what exists at the end is never looked through again.

    That holds for all objects of the process at that time. They are freed as ever when nobody refers to them; only
    those that by then refer to each other in a circle stay until the process ends. Where the collector was off, it
    stays off.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
