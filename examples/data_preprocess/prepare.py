"""Write the parquet shell that agent training reads.

The rows say only how many tasks a step has and whether observations are text or images; the tasks themselves come from
the environment. Nothing is downloaded. Running it again changes nothing: a file that is right is left alone.

::

    python -m examples.data_preprocess.prepare --mode text --train_data_size 16 --val_data_size 256
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

MODES = ("text", "visual")
IMAGE_MARKER = "<image>"
_BLANK_SIZE = 32  # pixels; the side of the blank image that stands for a visual observation


def row(mode: str, split: str, index: int) -> dict[str, Any]:
    """One row of the shell."""
    content = IMAGE_MARKER if mode == "visual" else ""
    values: dict[str, Any] = {"data_source": mode, "prompt": [{"role": "user", "content": content}]}
    if mode == "visual":
        values["images"] = [{"bytes": blank_image(), "path": None}]
    return {**values, "ability": "agent", "extra_info": {"split": split, "index": index}}


def blank_image() -> bytes:
    """A black PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (_BLANK_SIZE, _BLANK_SIZE)).save(buffer, format="PNG")
    return buffer.getvalue()


def write_split(path: Path, mode: str, split: str, size: int) -> bool:
    """Write one file, whole or not at all; returns False where it was there already.

    Raises:
        ValueError: ``size`` is not positive.
    """
    if size < 1:
        raise ValueError(f"--{'train' if split == 'train' else 'val'}_data_size={size} has to be at least 1")
    table = pa.Table.from_pylist([row(mode, split, index) for index in range(size)])
    if path.is_file() and _same(path, table):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    pq.write_table(table, temporary)
    os.replace(temporary, path)
    return True


def _same(path: Path, table: pa.Table) -> bool:
    try:
        return bool(pq.read_table(path).equals(table))
    except (OSError, pa.ArrowException):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    modes = "what observations are; models that read text only need text (default: %(default)s, as in verl-agent)"
    add("--mode", choices=MODES, default="visual", help=modes)
    add("--local_dir", default="~/data/verl-agent/", help="files go to LOCAL_DIR/MODE/ (default: %(default)s)")
    add("--hdfs_dir", default=None, help="also copy the files to this mounted folder (default: none)")
    rows = "rows of {}.parquet: {} (default: %(default)s)"
    add("--train_data_size", type=int, default=256, help=rows.format("train", "tasks per epoch"))
    add("--val_data_size", type=int, default=256, help=rows.format("test", "validation tasks"))
    arguments = parser.parse_args(argv)
    folder = Path(arguments.local_dir).expanduser() / arguments.mode
    for split, name, size in (
        ("train", "train.parquet", arguments.train_data_size),
        ("test", "test.parquet", arguments.val_data_size),
    ):
        try:
            written = write_split(folder / name, arguments.mode, split, size)
        except ValueError as error:
            parser.error(str(error))
        logger.info("%s: %d rows%s", folder / name, size, "" if written else " (already there)")
    if arguments.hdfs_dir is not None:
        target = Path(arguments.hdfs_dir).expanduser() / arguments.mode
        target.mkdir(parents=True, exist_ok=True)
        for name in ("train.parquet", "test.parquet"):
            shutil.copy2(folder / name, target / name)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    sys.exit(main())
