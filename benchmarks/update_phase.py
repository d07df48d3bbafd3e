"""How fast ranks update the policy: tokens per second and model FLOPs utilisation of the real actor, several ways.

    python3 -m benchmarks.update_phase                              # Qwen2.5-1.5B shape, random weights, on this GPU
    torchrun --nproc_per_node 2 -m benchmarks.update_phase          # on two
    python3 -m benchmarks.update_phase --arms fit-compiled padded   # some of the ways only
    python3 -m benchmarks.update_phase --shape tiny --device cpu
    python3 -m benchmarks.update_phase --shape smollm2-135m --prompt-tokens 700 900 --response-tokens 20 40 \\
        --rows 240 --micro-tokens 16384 65536 --arms fit --profile profile      # where a small model spends its time

Rows have the lengths of WebShop steps unless told otherwise, and each update has rows of its own, as in a run: lengths
that come again find more in caches. The loss has KL and entropy terms. With several ``--micro-tokens`` each way of the
actor runs once for each, with the same model. ``--occupied-gib`` takes memory as a rollout engine does beside a run's
update, and ``--fixed-segments`` leaves torch's allocator as it is, where a run lets its segments grow. ``--profile``
runs an update of up to three micro-batches and their log-probabilities once more under torch.profiler and writes a text
for each, see ``verl.utils.profiling``. The ways:

* ``plain``: what one writes without this trainer: a transformers model under FSDP2, 8 rows padded to 1,536 tokens, its
  own attention (sdpa), every layer recomputed, full logits. Its tokens per second count padding.
* ``padded``: the actor here, with each prompt padded to 4,096 tokens and each response to 512, and the padding run
  through the model, as a trainer without packing does.
* ``all``, ``fit``, ``none``: the actor here on packed rows, recomputing every layer, as many as memory asks for, or
  none; with ``-compiled`` decoder layers and head are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.shapes import SHAPES, shape_config
from verl.models.build import ModelSpec, build_model
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.fsdp_utils import (
    SMALL_MODEL,
    ShardingOptions,
    create_device_mesh,
    decoder_layers,
    ensure_process_group,
    parameters_to_keep_gathered,
    shard_model,
)
from verl.utils.profiling import profile_call
from verl.workers.actor import DataParallelPPOActor
from verl.workers.device_state import choose_device, growing_segments
from verl.workers.rows import RaggedRows
from verl.workers.step_costs import StepCosts

logger = logging.getLogger("benchmarks.update_phase")

PACKED = ("all", "fit", "none", "all-compiled", "fit-compiled", "none-compiled")
ARMS = ("plain", "padded", *PACKED)  # eager ones first: compiling the head holds for the process
DEFAULT_ARMS = ("plain", "padded", "all", "fit", "fit-compiled")
PADDED_PROMPT, PADDED_RESPONSE = 4096, 512
PROFILED = 3  # micro-batches under the profiler
WARM_UP = 2  # updates before those that count
PLAIN_ROWS, PLAIN_LENGTH = 8, 1536


@dataclasses.dataclass(frozen=True)
class RowSizes:
    """Least and most tokens of a prompt and of a response."""

    prompt: tuple[int, int] = (550, 1750)
    response: tuple[int, int] = (60, 250)

    def __post_init__(self) -> None:
        limits = {
            "--prompt-tokens": (self.prompt, PADDED_PROMPT),
            "--response-tokens": (self.response, PADDED_RESPONSE),
        }
        for option, ((least, most), limit) in limits.items():
            if not 1 <= least <= most <= limit:
                raise ValueError(f"{option} {least} {most}: give the least and the most, from 1 to {limit}")


def make_rows(count: int, vocabulary: int, seed: int | tuple[int, ...] = 0, sizes: RowSizes | None = None) -> DataProto:
    """Rows of random tokens; None takes the default sizes, 550–1,750 prompt and 60–250 response tokens."""
    sizes = sizes or RowSizes()
    rng = np.random.default_rng(seed)
    lengths = rng.integers(sizes.response[0], sizes.response[1] + 1, count)
    responses = torch.from_numpy(rng.integers(0, vocabulary, (count, PADDED_RESPONSE)))
    mask = (torch.arange(PADDED_RESPONSE) < torch.from_numpy(lengths)[:, None]).long()
    prompts = np.empty(count, dtype=object)
    for i in range(count):
        length = rng.integers(sizes.prompt[0], sizes.prompt[1] + 1)
        prompts[i] = rng.integers(0, vocabulary, length).astype(np.int32)
    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "old_log_probs": torch.full(mask.shape, -float(np.log(vocabulary))) * mask,
            "ref_log_prob": torch.full(mask.shape, -float(np.log(vocabulary))) * mask,
            "advantages": torch.from_numpy(rng.normal(size=mask.shape).astype(np.float32)) * mask,
        },
        non_tensors={"prompt_ids": prompts},
        meta_info={"temperature": 1.0},
    )


def pad_rows(rows: DataProto) -> DataProto:
    """The same rows with padding that runs through the model; masks keep it out of the loss."""
    prompts = np.empty(len(rows), dtype=object)
    for i, prompt in enumerate(rows.non_tensor_batch["prompt_ids"]):
        prompts[i] = np.concatenate([np.zeros(PADDED_PROMPT - len(prompt), dtype=np.int32), prompt])
    padded = DataProto(batch=rows.batch.clone(), non_tensor_batch={"prompt_ids": prompts}, meta_info=rows.meta_info)
    padded.batch["response_mask"] = padded.batch["response_mask"].float().clamp(min=1e-30)  # every position runs
    return padded


def rows_within(lengths: Sequence[int], tokens: int) -> int:
    """How many rows from the start stay within ``tokens``; at least one."""
    return max(1, int((np.cumsum(lengths) <= tokens).sum()))


def true_lengths(rows: DataProto) -> list[int]:
    """Tokens of each row without padding."""
    answers = rows.batch["response_mask"].sum(-1).tolist()
    return [len(prompt) + int(answer) for prompt, answer in zip(rows.non_tensor_batch["prompt_ids"], answers)]


class Bench:
    """Builds the model of an arm, times it, and forgets it."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args, self.folder = args, folder
        self.device = choose_device(args.device)
        self.config = shape_config(args.shape)
        self.sizes = RowSizes(tuple(args.prompt_tokens), tuple(args.response_tokens))
        self.flops = FlopsCounter(self.config)
        self.world = dist.get_world_size()
        half = torch.bfloat16 if self.device.type == "cuda" else None
        self.sharding = ShardingOptions(half, torch.float32 if half else None, args.reshard_after_forward)
        gathered_below = parameters_to_keep_gathered(args.device, torch.bfloat16) if args.keep_gathered else 0
        self.sharding = dataclasses.replace(self.sharding, whole_below=args.whole_below, gathered_below=gathered_below)
        self.costs = StepCosts(self.device)  # of all updates of a row together
        self.occupied = torch.empty(int(args.occupied_gib * 2**30), dtype=torch.uint8, device=self.device)

    def run(self, arm: str) -> Iterator[dict[str, Any]]:
        """Figures of an arm, one row for each token budget."""
        for row in self._plain() if arm == "plain" else self._actor(arm):
            row |= {name.removeprefix("perf/"): value for name, value in self.costs.metrics().items()}
            if self.device.type == "cuda":
                row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
            yield {"arm": arm} | row
        gc.collect()
        torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _plain(self) -> Iterator[dict[str, Any]]:
        with self.device:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, attn_implementation="sdpa")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shard_model(model, create_device_mesh(self.world, -1, self.device.type), self.sharding)
        model.train()
        optimizer = self._optimizer(model)
        length = PLAIN_LENGTH if self.args.shape != "tiny" else 96
        tokens = torch.randint(self.config.vocab_size, (PLAIN_ROWS, length), device=self.device)

        def update() -> None:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        self._forget_peak()
        row = self._measure(lambda _: update(), lambda _: ([length] * PLAIN_ROWS, tokens.numel()))
        yield row | self._profile("plain", {"update": update})

    def _actor(self, arm: str) -> Iterator[dict[str, Any]]:
        recompute, compiled = arm.split("-")[0], arm.endswith("-compiled")
        module = build_model(
            ModelSpec(self.folder, gradient_checkpointing=recompute != "none"),
            create_device_mesh(self.world, -1, self.device.type),
            dataclasses.replace(self.sharding, compile_layers=compiled),
        )
        actor_config = dataclasses.replace(
            default_config("preset=embedded").actor_rollout_ref.actor,
            use_dynamic_bsz=True,
            use_kl_loss=True,
            entropy_coeff=0.001,
            ppo_mini_batch_size=(self.args.mini_rows or self.args.rows) * self.world,
        )
        actor = DataParallelPPOActor(actor_config, module, self._optimizer(module))
        if recompute != "fit":
            actor.memory.device = torch.device("cpu")  # where nothing is fitted: neither layers nor micro-batches
        for budget in self.args.micro_tokens:
            self._forget_peak()
            rows = self.args.micro_rows
            plan = dataclasses.replace(actor.update_plan, max_tokens=budget, use_dynamic_bsz=rows is None, rows=rows)
            actor.update_plan = actor.log_prob_plan = plan
            yield {"micro_tokens": budget} | self._packed(arm, actor)

    def _packed(self, arm: str, actor: DataParallelPPOActor) -> dict[str, Any]:
        """Figures of an actor with the token budget it has."""
        count = self.args.rows if arm != "padded" else max(1, self.args.rows // 4)
        seeds = [(dist.get_rank(), number) for number in range(WARM_UP + self.args.steps)]
        updates = [make_rows(count, self.config.vocab_size, seed, self.sizes) for seed in seeds]
        batches = [pad_rows(rows) if arm == "padded" else rows for rows in updates]
        work = batches[0]
        work.batch["old_log_probs"], _ = actor.compute_log_prob(work)
        first = actor.update_policy(work)  # also the first of those that warm up
        row = self._measure(
            lambda number: actor.update_policy(batches[number]),
            lambda number: (true_lengths(updates[number]), int(updates[number].batch["response_mask"].sum())),
            warmed=1,
        )
        row["first_ppo_kl"] = float(f"{first['actor/ppo_kl']:.2g}")
        row["recomputed"] = sum(layer.gradient_checkpointing for layer in decoder_layers(actor.actor_module))
        self._timed(lambda: actor.compute_log_prob(work))
        seconds = self._timed(lambda: actor.compute_log_prob(work))
        row["log_prob_s"] = round(seconds, 4)
        row["log_prob_tokens_per_s"] = round(self._over_ranks(sum(true_lengths(updates[0]))) / seconds / self.world)
        if not self.args.profile:
            return row
        few = work[: rows_within(RaggedRows(work).lengths, PROFILED * actor.update_plan.max_tokens)]
        calls = {"update": lambda: actor.update_policy(few), "log_prob": lambda: actor.compute_log_prob(few)}
        return row | self._profile(f"{arm}-{actor.update_plan.max_tokens}", calls)

    def _optimizer(self, module: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(module.parameters(), lr=1e-6, fused=self.device.type == "cuda")

    def _measure(
        self, update: Callable[[int], Any], sizes: Callable[[int], tuple[list[int], int]], warmed: int = 0
    ) -> dict[str, Any]:
        """Figures a rank over all updates after those that warm up.

        Args:
            update: takes the number of the update, from ``warmed`` on.
            sizes: lengths of its rows, and tokens that go through the head.
            warmed: updates that warmed up before.
        """
        first = [self._timed(update, number) for number in range(warmed, WARM_UP)]
        numbers = range(WARM_UP, WARM_UP + self.args.steps)
        seconds = [self._timed(update, number) for number in numbers]
        tokens = self._over_ranks(sum(sum(sizes(number)[0]) for number in numbers)) / self.world
        flops = self._over_ranks(sum(self.flops.training_flops(*sizes(number)) for number in numbers)) / self.world
        return {
            "update_s": round(sum(seconds) / len(seconds), 4),
            "fastest_s": round(min(seconds), 4),
            "warm_up_s": round(first[0], 2),
            "tokens_per_s": round(tokens / sum(seconds)),
            "mfu": round(flops / sum(seconds) / get_device_flops("B"), 4),
        }

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> float:
        """Seconds until every rank is through."""
        self._wait()
        begin = time.perf_counter()
        call(*arguments)
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _over_ranks(self, value: float) -> float:
        total = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _profile(self, name: str, calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Profiles of calls on rank 0, as ``{name}-{call}.txt``; other ranks only take part."""
        if not self.args.profile:
            return {}
        figures = {}
        for key, call in calls.items():
            self._timed(call)  # allocations and graphs of these sizes
            if dist.get_rank() == 0:
                path = self.args.profile / f"{name}-{key}.txt"
                figures[key] = profile_call(call, path, f"{name}, {key}", self.device, self.args.trace)
            else:
                call()
            self._wait()
        return {"profile": figures}


def table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """Rows as Markdown; figures are for one of ``ranks`` ranks."""
    lines = [
        f"| way, figures a rank of {ranks} | micro-batch | tokens/s | MFU | memory GiB | layers recomputed "
        "| log-prob tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (
            row["arm"], row.get("micro_tokens", ""), f"{row['tokens_per_s']:,}", f"{row['mfu']:.1%}",
            row.get("memory_gib", ""), row.get("recomputed", ""),
            f"{row['log_prob_tokens_per_s']:,}" if "log_prob_tokens_per_s" in row else "",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _count(text: str) -> int:
    """A whole number from 1 on, for argparse, which names the option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} has to be a whole number, at least 1")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=_count, default=64, help="a rank; a quarter of them when padded")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=RowSizes.prompt, metavar=("LEAST", "MOST"))
    parser.add_argument("--response-tokens", type=int, nargs=2, default=RowSizes.response, metavar=("LEAST", "MOST"))
    parser.add_argument("--micro-tokens", type=_count, nargs="+", default=[16384], help="tokens of a micro-batch")
    parser.add_argument("--micro-rows", type=_count, help="rows of a micro-batch instead")
    parser.add_argument("--mini-rows", type=_count, help="rows of an optimiser step a rank; without it all")
    parser.add_argument("--reshard-after-forward", action="store_true", help="free weights after the forward")
    parser.add_argument("--keep-gathered", action="store_true", help="… unless the model is small, as runs do")
    parser.add_argument("--whole-below", type=int, default=SMALL_MODEL, help="0 makes every layer a unit of FSDP")
    parser.add_argument("--occupied-gib", type=float, default=0.0, help="memory that something else holds")
    parser.add_argument("--fixed-segments", action="store_true", help="no segments that grow")
    parser.add_argument("--steps", type=_count, default=4, help="timed updates, after two that warm up")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a profile of each way into this folder")
    parser.add_argument("--trace", action="store_true", help="with --profile: Chrome traces too, large")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    choose_device(args.device)
    ensure_process_group(args.device)
    quiet = dist.get_rank() != 0
    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, format="%(message)s")
    rows: list[dict[str, Any]] = []
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shape_config(args.shape).save_pretrained(folder)
        bench = Bench(args, folder)
        with contextlib.nullcontext() if args.fixed_segments else growing_segments(bench.device):
            for row in (row for arm in sorted(args.arms, key=ARMS.index) for row in bench.run(arm)):
                rows.append(row)
                logger.info("arm: %s", json.dumps(row))
                if args.out and not quiet:
                    args.out.write_text(json.dumps({"ranks": bench.world, "rows": rows}, indent=1), encoding="utf-8")
    logger.info("%s", table(rows, bench.world))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
