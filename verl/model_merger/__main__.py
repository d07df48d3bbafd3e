"""Turn a sharded checkpoint into a Hugging Face folder, or compare it with one.

::

    python -m verl.model_merger merge --local_dir RUN/global_step_40/actor --target_dir my_model
    python -m verl.model_merger merge --local_dir RUN/global_step_40/actor --target_dir my_adapter --lora keep
    python -m verl.model_merger test  --local_dir RUN/global_step_40/actor --test_hf_dir my_model

Neither a GPU nor the number of ranks of the run is needed. The folder appears only when it has been loaded again and
differs from the base model. Exit codes: 0 = done, 1 = it cannot be done or (test) the two differ, with one line that
says why.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from verl.model_merger.merge import NO_BASE, MergeOptions, merge, test
from verl.model_merger.upload import upload

EXIT_DONE, EXIT_FAILED = 0, 1
DTYPES = ("auto", "bf16", "fp16", "fp32", "bfloat16", "float16", "float32")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.model_merger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("merge", "write a Hugging Face folder"), ("test", "compare with a Hugging Face folder")):
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        add = command.add_argument
        add("--backend", choices=("fsdp", "megatron"), default="fsdp", help="only fsdp exists here")
        add("--local_dir", required=True, type=Path, help="…/global_step_N/actor (or critic, or model of fine-tuning)")
        add(
            "--base_model", "--hf_model_path", metavar="PATH",
            help=f"model that training started from; default: what the checkpoint names; {NO_BASE}: do not compare",
        )  # fmt: skip
        add("--is-value-model", "--is_value_model", action="store_true", help="the checkpoint is a critic")
        add("--tie-word-embedding", "--tie_word_embedding", action="store_true", help="tie input and output embeddings")
        add("--trust-remote-code", "--trust_remote_code", action="store_true", help="let the model's own code run")
        if name == "test":
            add("--test_hf_dir", required=True, type=Path, help="the folder to compare with")
            add("--atol", type=float, default=1e-6, help="largest difference that counts as none (default: 1e-6)")
            continue
        add("--target_dir", type=Path, default=Path("tmp"), help="the new folder (default: tmp)")
        add("--dtype", choices=DTYPES, default="auto", help="of the weights; auto = the base model's (default)")
        add("--lora", choices=("merge", "keep"), default="merge", help="keep: write adapters as a peft folder")
        add("--hf_upload_path", metavar="REPO", help="also upload the folder to this hub repository")
        add("--private", action="store_true", help="make the hub repository private")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.backend != "fsdp":
            raise ValueError("--backend megatron: there is no Megatron backend here, and so no checkpoint of it")
        return _merge(arguments) if arguments.command == "merge" else _test(arguments)
    except ValueError as error:
        sys.stderr.write(f"model_merger: {error}\n")
        return EXIT_FAILED


def _options(arguments: argparse.Namespace, base_model: str | None) -> MergeOptions:
    return MergeOptions(
        local_dir=arguments.local_dir,
        base_model=base_model,
        dtype=getattr(arguments, "dtype", "auto"),
        lora=getattr(arguments, "lora", "merge"),
        is_value_model=arguments.is_value_model,
        tie_word_embedding=arguments.tie_word_embedding,
        trust_remote_code=arguments.trust_remote_code,
    )


def _merge(arguments: argparse.Namespace) -> int:
    merge(_options(arguments, arguments.base_model), arguments.target_dir, _say)
    if arguments.hf_upload_path:
        _say(f"uploaded to {upload(arguments.target_dir, arguments.hf_upload_path, arguments.private)}")
    return EXIT_DONE


def _test(arguments: argparse.Namespace) -> int:
    difference = test(_options(arguments, NO_BASE), arguments.test_hf_dir, arguments.atol, _say)
    _say("the same model" if difference.none else "NOT the same model")
    return EXIT_DONE if difference.none else EXIT_FAILED


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that what was half written is removed


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
