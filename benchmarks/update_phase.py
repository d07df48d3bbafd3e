"""How fast a rank updates the policy: tokens per second and model FLOPs utilisation of the real actor.

    python3 -m benchmarks.update_phase                      # Qwen2.5-1.5B shape, random weights, on this GPU
    python3 -m benchmarks.update_phase --shape tiny --device cpu

Rows have the lengths of WebShop steps. ``--padded`` pads each prompt to 4,096 tokens and each response to 512, and runs
the padding through the model, as a trainer without packing does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import tempfile
import time

import numpy as np
import torch
from transformers import Qwen2Config

from verl.models.build import ModelSpec, build_model
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, ensure_process_group
from verl.workers.actor import DataParallelPPOActor

logger = logging.getLogger(__name__)

SHAPES = {
    "1.5b": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
    "tiny": dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        tie_word_embeddings=True,
    ),
}
PADDED_PROMPT, PADDED_RESPONSE = 4096, 512


def make_rows(count: int, vocabulary: int, seed: int = 0) -> DataProto:
    """Rows of 550–1,750 prompt and 60–250 response tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(60, 251, count)
    responses = torch.from_numpy(rng.integers(0, vocabulary, (count, PADDED_RESPONSE)))
    mask = (torch.arange(PADDED_RESPONSE) < torch.from_numpy(lengths)[:, None]).long()
    prompts = np.empty(count, dtype=object)
    for i in range(count):
        prompts[i] = rng.integers(0, vocabulary, rng.integers(550, 1751)).astype(np.int32)
    return DataProto.from_dict(
        tensors={
            "responses": responses,
            "response_mask": mask,
            "old_log_probs": torch.full(mask.shape, -float(np.log(vocabulary))) * mask,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=4, help="timed updates, after two that warm up")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the ten costliest kernels")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    ensure_process_group(args.device)
    config = Qwen2Config(**SHAPES[args.shape])
    half = torch.bfloat16 if args.device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        module = build_model(
            ModelSpec(folder, gradient_checkpointing=args.checkpointing),
            create_device_mesh(1, -1, args.device),
            ShardingOptions(half, torch.float32 if half else None, False, compile_layers=args.compile),
        )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=args.device == "cuda")
    actor_config = dataclasses.replace(
        default_config("preset=embedded").actor_rollout_ref.actor,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=args.micro_tokens,
        ppo_mini_batch_size=args.rows,
    )
    actor = DataParallelPPOActor(actor_config, module, optimizer)
    rows = make_rows(args.rows, config.vocab_size)
    lengths = [
        len(p) + int(n) for p, n in zip(rows.non_tensor_batch["prompt_ids"], rows.batch["response_mask"].sum(-1))
    ]
    head_tokens = int(rows.batch["response_mask"].sum())
    work = pad_rows(rows) if args.padded else rows

    def timed(call) -> float:  # noqa: ANN001
        if args.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    warm_up = [timed(lambda: actor.update_policy(work)) for _ in range(2)]
    seconds = min(timed(lambda: actor.update_policy(work)) for _ in range(args.steps))
    timed(lambda: actor.compute_log_prob(work))
    log_prob_seconds = timed(lambda: actor.compute_log_prob(work))
    flops = FlopsCounter(config).training_flops(lengths, head_tokens)
    report = {
        "options": {k: v for k, v in vars(args).items() if v},
        "tokens": sum(lengths),
        "warm_up_s": [round(s, 2) for s in warm_up],
        "update_s": round(seconds, 4),
        "update_tokens_per_s": round(sum(lengths) / seconds),
        "log_prob_tokens_per_s": round(sum(lengths) / log_prob_seconds),
        "mfu": round(flops / seconds / get_device_flops("B"), 4),
    }
    if args.device == "cuda":
        report["max_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    logger.info(json.dumps(report))
    if args.profile:
        with torch.profiler.profile() as profiler:
            timed(lambda: actor.update_policy(work))
        order = "self_cuda_time_total" if args.device == "cuda" else "self_cpu_time_total"
        logger.info(profiler.key_averages().table(sort_by=order, row_limit=18, max_name_column_width=60))


if __name__ == "__main__":
    main()
