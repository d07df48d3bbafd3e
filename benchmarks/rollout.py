"""The rollout loop against plain vLLM, on the same recorded episodes, in one run on one engine.

    python3 -m benchmarks.rollout                       # Qwen2.5-1.5B shape, random weights, on this GPU
    python3 -m benchmarks.rollout --event 16:2 64:8     # the loop with other slices as well (most steps:cost of a join)
    python3 -m benchmarks.rollout --replicas 2          # two GPUs, an engine each; --tensor-parallel 2: one engine
    python3 -m benchmarks.rollout --tiny                # the same on CPU, in a minute

A trace of 128 episodes of 3–15 turns (see ``rollout_trace``) is replayed

* all requests at once through ``LLM.generate``: a bound that no multi-turn run reaches, since a turn's prompt is known
  only after the turn before;
* in lock-step by turn, where every turn waits for the longest answer; with ``--whole-batch`` also as trainers do that
  go on generating for finished episodes;
* through the trainer's own loop: scheduler, generation client, worker group, session processes.

All arms generate exactly the same numbers of tokens. The engine's idle share is the time in which no engine step ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import PretrainedConfig

from agent_system.multi_turn_rollout.episode_loop import EpisodeLoop, RolloutPlan
from agent_system.multi_turn_rollout.scheduler import JOIN_COST, ReplicaScheduler
from benchmarks.rollout_trace import (
    ForcedLengthClient,
    Trace,
    TraceEncoder,
    TraceEnvironments,
    TracePrompts,
    check_lengths,
)
from benchmarks.shapes import shape_config
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import default_config
from verl.trainer.ppo.resources import worker_env_vars
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import ensure_process_group
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.device_state import choose_device
from verl.workers.rollout.base import RolloutRequest, RolloutResult, SamplingSettings
from verl.workers.rollout.factory import build_rollout_engine

logger = logging.getLogger("benchmarks.rollout")

TOKENIZER = "pkg://agent_system.environments.env_package.webshop/embedded_model"
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=512, ignore_eos=True)
EVERYTHING = 1 << 30  # engine steps: until all requests are finished


class EngineWorker(Worker):
    """A rank with an engine and no trainer. ``folder`` holds a ``config.json``; the weights are random."""

    def __init__(self, rollout: Any, folder: str, device: str) -> None:
        super().__init__()
        self._rollout, self._folder = rollout, folder
        self._device = choose_device(device)
        ensure_process_group(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self) -> float:
        """Starts the engine; seconds."""
        begin = time.perf_counter()
        self._engine = build_rollout_engine(self._rollout, self._folder, eos_token_ids=(), device=self._device.type)
        return time.perf_counter() - begin

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_rollout(self) -> dict[str, float]:
        self._engine.reset_prefix_cache()
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> dict[str, float]:
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_layout(self) -> tuple[int, int]:
        return divmod(self.rank, self._rollout.ranks_per_engine)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rollout_step(self, requests: Sequence[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        return self._engine.step(requests, max_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_stats(self) -> dict[str, float]:
        return self._engine.stats()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def plain_generate(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
        """``LLM.generate`` on everything at once, with log-probs: (seconds, tokens generated)."""
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, seed=row)
            for row, length in enumerate(lengths)
        ]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        begin = time.perf_counter()
        outputs = self._engine.llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - begin, sum(len(output.outputs[0].token_ids) for output in outputs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def time_steps(self, batch: int, prompt_tokens: int) -> dict[str, float]:
        """Milliseconds of a decode step with ``batch`` requests, and of one that also reads a prompt."""
        engine, sampling = self._engine, dataclasses.replace(SAMPLING, max_tokens=64)
        draw = torch.randint(1000, (batch + 1, prompt_tokens), generator=torch.Generator().manual_seed(3)).int().numpy()
        short = [ids[: min(32, prompt_tokens)] for ids in draw[:batch]]
        rows = [RolloutRequest(f"time-{i}", ids, sampling, i) for i, ids in enumerate([*short, draw[batch]])]
        engine.reset_prefix_cache()
        engine.step(rows[:batch], 16)  # prompts are read
        begin = time.perf_counter()
        engine.step([], 16)
        decode = time.perf_counter() - begin
        begin = time.perf_counter()
        engine.step(rows[batch:], 9)  # of these one reads the prompt; its tokens may come a step later
        mixed = time.perf_counter() - begin - 8 * decode / 16
        engine.step([], EVERYTHING)
        return {"batch": batch, "decode_ms": 1000 * decode / 16, "with_a_prompt_ms": 1000 * mixed}


class Bench:
    """The arms. Each returns a row of the table."""

    def __init__(self, args: argparse.Namespace, trace: Trace, group: RayWorkerGroup, vocabulary: int) -> None:
        self.trace, self.group, self.args = trace, group, args
        self.prompts = TracePrompts(trace, vocabulary, args.shared_prefix)
        self.client = ForcedLengthClient(group, trace)
        self.tokenizer = hf_tokenizer(copy_to_local(TOKENIZER))
        self.envs = TraceEnvironments(trace, args.env_processes)

    def at_once(self) -> dict[str, Any]:
        """Everything through ``LLM.generate``; the requests are dealt out evenly over replicas."""
        self.client.begin()
        calls = []
        for replica in range(self.client.num_replicas):
            mine = self.trace.turns[replica :: self.client.num_replicas]
            prompts = [self.prompts.ids[place].tolist() for place in mine]
            lengths = [self.trace.episodes[slot][turn].response_tokens for slot, turn in mine]
            ranks = self.client.ranks_of(replica)
            calls += self.group.execute_ranks_async(ranks, "plain_generate", prompts, lengths)[:1]
        answers = self.group.get(calls, method="plain_generate")
        seconds, tokens = max(answer[0] for answer in answers), sum(answer[1] for answer in answers)
        assert tokens == self.trace.response_tokens, "plain vLLM did not keep to the trace's lengths"
        return self._row("all at once, plain vLLM (bound)", seconds)

    def lock_step(self, whole_batch: bool) -> dict[str, Any]:
        """Turn after turn; ``whole_batch`` repeats a finished episode's last turn until all are finished."""
        before, begin = self._stats(), time.perf_counter()
        self.client.begin()
        results: list[RolloutResult] = []
        extra = 0
        self._wait_for_environments(self.envs.begin(range(len(self.trace.episodes) // self.trace.group_size)))
        for turn in range(max(map(len, self.trace.episodes))):
            active = [slot for slot, episode in enumerate(self.trace.episodes) if len(episode) > turn]
            playing = range(len(self.trace.episodes)) if whole_batch else active
            results += self._generate(turn, playing)
            extra += sum(self.trace.episodes[slot][-1].response_tokens for slot in set(playing) - set(active))
            self._wait_for_environments(self.envs.submit_steps([(slot, "") for slot in active]))
        self.client.end()
        seconds = time.perf_counter() - begin
        check_lengths(results, self.trace.response_tokens + extra)
        name = "lock-step, finished episodes go on" if whole_batch else "lock-step, active episodes only"
        return self._row(name, seconds, before)

    def event_driven(self, most_steps: int, join_cost: float) -> dict[str, Any]:
        """The trainer's loop."""
        before, begin = self._stats(), time.perf_counter()
        self.client.begin()
        scheduler = ReplicaScheduler(self.client, most_steps, call_limit_s=600, join_cost=join_cost)
        groups = len(self.trace.episodes) // self.trace.group_size
        plan = RolloutPlan(
            f"event{most_steps}", (0, "bench"), groups, groups, max_turns=1 << 30, sampling=SAMPLING, progress_bar=False
        )
        loop = EpisodeLoop(plan, self.envs, scheduler, TraceEncoder(self.tokenizer, self.prompts), self.tokenizer)
        loop.run()
        self.client.end()
        seconds = time.perf_counter() - begin
        assert scheduler.counts.generated_tokens == self.trace.response_tokens, "the loop left the trace"
        row = self._row(f"event-driven, slices ≤ {most_steps}, join {join_cost:g}", seconds, before)
        return row | {"slices": scheduler.counts.slices, "env_wait_s": round(loop.counts.env_only_wait_s, 2)}

    def close(self) -> None:
        self.envs.close()

    def _generate(self, turn: int, slots: Sequence[int]) -> list[RolloutResult]:
        calls = []
        for replica in range(self.client.num_replicas):
            requests = []
            for slot in list(slots)[replica :: self.client.num_replicas]:
                place = slot, min(turn, len(self.trace.episodes[slot]) - 1)
                group, member = divmod(slot, self.trace.group_size)
                name = f"lock{turn}-group{group}-member{member}-turn{place[1]}"
                requests.append(RolloutRequest(name, self.prompts.ids[place], SAMPLING, seed=slot))
            if requests:
                calls.append(self.client.submit(replica, requests, EVERYTHING))
        results = [result for call in calls for result in self.client.receive(call)]
        self.tokenizer.batch_decode([result.response_ids for result in results])
        return results

    def _wait_for_environments(self, refs: list[ray.ObjectRef]) -> None:
        observations = [pair[1] for ref in refs for pair in self.envs.collect(ref)]
        TraceEncoder(self.tokenizer, self.prompts).encode([o.prompt for o in observations if not o.done])

    def _stats(self) -> dict[str, float]:
        """Summed over replicas."""
        total: dict[str, float] = {}
        for (_, tp_rank), stats in zip(self.group.rollout_layout(), self.group.rollout_stats()):
            for key, value in stats.items() if tp_rank == 0 else ():
                total[key] = total.get(key, 0.0) + value
        return total

    def _row(self, name: str, seconds: float, before: dict[str, float] | None = None) -> dict[str, Any]:
        row: dict[str, Any] = {"arm": name, "seconds": round(seconds, 3)}
        row["tokens_per_s"] = round(self.trace.response_tokens / seconds)
        if before is not None:
            spent = {key: value - before[key] for key, value in self._stats().items()}
            row["idle_share"] = round(1 - spent["busy_s"] / (seconds * self.client.num_replicas), 4)
            row["steps"] = int(spent["steps"])
            row["mean_running"] = round(spent["running_sum"] / max(spent["steps"], 1), 1)
        return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown; ``ratio`` is to the faster of the two runs of the bound."""
    lines = ["| arm | seconds | tokens/s | of the bound | engine idle | engine steps | running | slices |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        idle = f"{row['idle_share']:.1%}" if "idle_share" in row else ""
        cells = (
            row["arm"], f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,}", f"{row['ratio']:.3f}", idle,
            row.get("steps", ""), row.get("mean_running", ""), row.get("slices", ""),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def start_engines(args: argparse.Namespace, shape: PretrainedConfig, folder: str) -> RayWorkerGroup:
    shape.save_pretrained(folder)
    longest = args.prompt_tokens[1] + args.response_tokens[1]
    config = default_config(
        "preset=embedded",
        f"trainer.device={args.device}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={args.tensor_parallel}",
        f"actor_rollout_ref.rollout.dtype={'float32' if args.device == 'cpu' else 'bfloat16'}",
        f"actor_rollout_ref.rollout.enforce_eager={args.device == 'cpu'}",
        "actor_rollout_ref.rollout.enable_chunked_prefill=False",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "actor_rollout_ref.rollout.max_num_seqs=1024",
        f"actor_rollout_ref.rollout.max_model_len={max(longest + 8, 256 if args.tiny else 4608)}",
        f"data.max_prompt_length={args.prompt_tokens[1]}",
        f"data.max_response_length={args.response_tokens[1]}",
        *args.overrides,
    )
    pool = RayResourcePool([args.replicas * args.tensor_parallel], use_gpu=args.device == "cuda", max_colocate_count=1)
    ranks = RayClassWithInitArgs(EngineWorker, config.actor_rollout_ref.rollout, folder, args.device)
    return RayWorkerGroup(pool, ranks, env_vars=worker_env_vars(config))


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = ("episodes", "group_size", "turns", "prompt_tokens", "response_tokens", "env_seconds")
    drawn = None if args.trace else {name: getattr(args, name) for name in names}
    trace = Trace.load(args.trace) if drawn is None else Trace.draw(**drawn)
    if args.save_trace:
        trace.save(args.save_trace)
    gpus = args.replicas * args.tensor_parallel if args.device == "cuda" else 0
    ray.init(address="local", num_cpus=16, num_gpus=gpus, include_dashboard=False, logging_level=logging.WARNING)
    shape = shape_config("tiny" if args.tiny else "1.5b")
    report: dict[str, Any] = {
        "requests": len(trace.turns), "prompt_tokens": trace.prompt_tokens, "response_tokens": trace.response_tokens,
        "replicas": args.replicas, "tensor_parallel": args.tensor_parallel, "env_seconds": args.env_seconds,
        "shared_prefix": args.shared_prefix, "overrides": args.overrides, "drawn": drawn,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        group = start_engines(args, shape, folder)
        report["engine_start_s"] = [round(seconds, 1) for seconds in group.build()]
        bench = Bench(args, trace, group, shape.vocab_size)
        try:
            run_arms(bench, args, report)
        finally:
            bench.close()
            group.shutdown()
            ray.shutdown()


def run_arms(bench: Bench, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Warms up, plays every arm, and prints the table after each, so that a run cut short still says something."""
    ranks = bench.client.ranks_of(0)
    for batch in args.step_batches:
        calls = bench.group.execute_ranks_async(ranks, "time_steps", batch, args.prompt_tokens[1])
        times = bench.group.get(calls, method="time_steps")[0]
        logger.info("step: %s", json.dumps({key: round(value, 2) for key, value in times.items()}))
        report.setdefault("steps", []).append(times)
    rows: list[dict[str, Any]] = []
    arms = [bench.at_once, lambda: bench.lock_step(False)]
    arms += [lambda setting=setting: bench.event_driven(*setting) for setting in args.event]
    if args.whole_batch:
        arms.append(lambda: bench.lock_step(True))
    arms.append(bench.at_once)  # the bound once more: how far one run agrees with itself
    for arm in arms:
        rows.append(arm())
        bound = min(row["seconds"] for row in rows if "bound" in row["arm"])
        for row in rows:
            row["ratio"] = bound / row["seconds"]
        logger.info("arm: %s", json.dumps(rows[-1]))
        if args.out:
            args.out.write_text(json.dumps(report | {"rows": rows}, indent=1), encoding="utf-8")
    logger.info("%s\n%s", json.dumps({key: value for key, value in report.items() if key != "steps"}), table(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--env-seconds", type=float, default=0.0, help="mean time of an environment step")
    parser.add_argument("--env-processes", type=int, default=4)
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--event", nargs="+", type=_setting, help="settings of the loop: most steps[:cost of a join]")
    parser.add_argument("--whole-batch", action="store_true", help="also lock-step with finished episodes going on")
    parser.add_argument("--step-batches", nargs="*", type=int, help="batch sizes at which single steps are timed")
    parser.add_argument("--trace", type=Path, help="replay this trace")
    parser.add_argument("--save-trace", type=Path)
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("overrides", nargs="*", help="further overrides of the configuration")
    args = parser.parse_intermixed_args()
    args.turns, args.prompt_tokens, args.response_tokens = (3, 15), (550, 1250), (60, 250)
    if args.tiny:
        args.turns, args.prompt_tokens, args.response_tokens = (1, 4), (30, 60), (8, 24)
    args.episodes = args.episodes or (16 if args.tiny else 128)
    args.event = args.event or [(32, JOIN_COST)]
    args.step_batches = ([4] if args.tiny else [16, 64, 128]) if args.step_batches is None else args.step_batches
    return args


def _setting(text: str) -> tuple[int, float]:
    steps, _, cost = text.partition(":")
    return int(steps), float(cost or JOIN_COST)


if __name__ == "__main__":
    main()
