"""How far GiGPO's first update differs from GRPO's: the gradients themselves, on episodes that the model played.

    python3 -m benchmarks.gradient_directions
    python3 -m benchmarks.gradient_directions --model checkpoints/RUN/global_step_15/actor/huggingface --batches 4

Batches of 8 tasks × 8 episodes in the embedded shop, sampled at temperature 1, scored, and given advantages as in
``examples/gigpo_trainer/run_webshop.sh``. Of each batch the gradient of the policy loss where training starts (the
ratio is 1, the KL term's gradient 0), once with the episode term of the advantage alone, which is GRPO without a
standard deviation, and once with the step term; GiGPO's is the sum. Nothing is trained; two minutes a batch on a core.

What a cosine between the two algorithms means depends on how much the gradient of one batch says at all. So beside it
stand cosines of gradients on the two halves of a batch, four tasks each, and on different batches. "Across" is GiGPO's
gradient less its part along GRPO's. That it agrees with itself on other tasks says that it is more than noise; that it
agrees with GRPO's gradient there, that it points where GRPO's points in the mean. The standard errors of figures
between batches are too small, since these share batches. Left out: that a batch is several optimiser steps in the
recipe. Here it is one, so noise is smaller than in a run.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import ray
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_system.environments.env_manager import make_envs
from agent_system.multi_turn_rollout import TrajectoryCollector
from gigpo.core_gigpo import compute_step_discounted_returns, gigpo_terms, on_tokens
from verl.models.attention import register_packed_attention
from verl.models.heads import forward_log_probs, install_log_prob_head
from verl.models.micro_batches import split_by_tokens
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig, default_config
from verl.trainer.ppo.aggregation import LossNormalizer, token_and_row_counts
from verl.trainer.ppo.policy_loss import vanilla_policy_loss
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.scoring import score_rows
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.role_models import end_token_ids
from verl.workers.rollout.base import RolloutEngine, RolloutRequest, RolloutResult
from verl.workers.rollout.factory import build_rollout_engine
from verl.workers.rows import RaggedRows

logger = logging.getLogger("benchmarks.gradient_directions")

SET_UP = "preset=embedded trainer.progress_bar=False data.val_batch_size=1 actor_rollout_ref.rollout.name=hf".split()
ALGORITHM = "adv_estimator=gigpo gamma=0.95 gigpo.mode=mean_norm".split()
ACTOR = "use_invalid_action_penalty=True invalid_action_penalty_coef=0.1".split()
Figures = dict[str, float]


@dataclass
class EngineHere:
    """The ``GenerationClient`` of an engine in this process: a call has run when ``submit`` returns."""

    engine: RolloutEngine
    num_replicas: int = 1

    def begin(self) -> dict[str, float]:
        return {}

    end = begin

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef:
        return ray.put(self.engine.step(requests, max_steps))

    def receive(self, call: ray.ObjectRef) -> list[RolloutResult]:
        return ray.get(call)

    def check(self) -> None:
        """There are no further ranks."""


def played(config: PPOTrainerConfig, model: PreTrainedModel, folder: str, batches: int) -> Iterator[DataProto]:
    """The rows of so many training batches, with ``token_level_scores`` and ``step_rewards``."""
    tokenizer = hf_tokenizer(folder)
    ends = end_token_ids(tokenizer, model.generation_config)
    engine = build_rollout_engine(config.actor_rollout_ref.rollout, folder, eos_token_ids=ends, device="cpu")
    engine.load_weights(model.named_parameters(remove_duplicate=False))
    collector, reward = TrajectoryCollector(config, tokenizer), load_reward_manager(config, tokenizer, num_examine=0)
    environments, unused = make_envs(config)
    try:
        for number in range(1, batches + 1):
            columns = {"task": torch.arange(config.data.train_batch_size)}
            shell = DataProto.from_single_dict(columns, meta_info={"global_steps": number})  # part of the seeds
            rows = collector.multi_turn_loop(shell, EngineHere(engine), environments)
            rows.batch["step_rewards"] = compute_step_discounted_returns(rows, config.algorithm.gamma)
            yield score_rows(rows, reward, config)[0]
    finally:
        environments.close()
        unused.close()


def advantage_terms(rows: DataProto, config: PPOTrainerConfig) -> np.ndarray:
    """Episode term and weighted step term of every row, float64 (2, rows)."""
    tensors = (rows.batch[name] for name in ("token_level_scores", "step_rewards", "response_mask"))
    arrays = (rows.non_tensor_batch[name] for name in ("anchor_obs", "uid", "traj_uid"))
    terms = gigpo_terms(*tensors, *arrays, mode=config.algorithm.gigpo.mode)
    return np.stack([terms.episode, config.algorithm.gigpo.step_advantage_w * terms.step])


def halves(uids: Sequence[str]) -> list[np.ndarray]:
    """Row positions of the first half of the tasks and of the others, in the order in which tasks appear."""
    tasks = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
    in_first = np.array([2 * tasks[uid] < len(tasks) for uid in uids])
    return [np.flatnonzero(in_first), np.flatnonzero(~in_first)]


def gradients(
    model: nn.Module, rows: DataProto, advantages: np.ndarray, parts: Sequence[np.ndarray], config: PPOTrainerConfig
) -> torch.Tensor:
    """Gradients of the policy loss at ratio 1, each part's share of the whole batch's: float64 (parts, A, parameters).

    ``advantages`` (A, rows) has a value for every token of a row, and each of the A gives a gradient; ``parts`` are
    positions of rows. The model has the packed head of ``verl.models.heads``.
    """
    actor, temperature = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.temperature
    ragged, mask = RaggedRows(rows), rows.batch["response_mask"].bool()
    average = LossNormalizer(actor.loss_agg_mode, *token_and_row_counts(mask).tolist(), config.data.max_response_length)
    on_rows = [on_tokens(values, mask) for values in advantages]  # (N, R) each
    parameters = list(model.parameters())
    result = torch.zeros(len(parts), len(on_rows), sum(map(torch.numel, parameters)), dtype=torch.float64)
    for part, members in enumerate(parts):
        members = members[advantages[:, members].any(0)]  # the others add nothing
        for group in split_by_tokens(ragged.lengths[members].tolist(), actor.ppo_max_token_len_per_gpu):
            indices = members[group]
            packed, chosen = ragged.pack(indices, "cpu"), mask[indices]
            flat, _ = forward_log_probs(model, packed, temperature, with_entropy=False)
            log_probs = packed.scatter_response(flat, ragged.width)  # (rows of the group, R)
            for number, values in enumerate(on_rows):
                loss = vanilla_policy_loss(log_probs.detach(), log_probs, values[indices], chosen, actor).loss
                share = torch.autograd.grad(average(loss, chosen), parameters, retain_graph=True)
                result[part, number] += torch.cat([gradient.flatten() for gradient in share]).double()
    return result


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of two vectors; 0 where one of them is 0."""
    return float(first @ second / (first.norm() * second.norm()).clamp(min=1e-300))


def adam_step(gradient: torch.Tensor, clip: float) -> torch.Tensor:
    """AdamW's first step per learning rate without weight decay: -g / (|g| + 1e-8) of the clipped gradient."""
    gradient = gradient * min(1.0, clip / (float(gradient.norm()) + 1e-6))
    return -gradient / (gradient.abs() + 1e-8)


def across(vector: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """``vector`` less its part along ``direction``."""
    return vector - direction * (vector @ direction) / (direction @ direction).clamp(min=1e-300)


def compare(parts: torch.Tensor, clip: float) -> Figures:
    """The figures of a batch from its gradients (2 halves, episode and step term, parameters); ``actor.grad_clip``."""
    (grpo, step), gigpo = parts.sum(0), parts.sum((0, 1))
    (grpo_1, grpo_2), (gigpo_1, gigpo_2) = parts[:, 0], parts.sum(1)
    return {
        "cosine of episode and step term's gradients": cosine(grpo, step),
        "**cosine of GRPO's and GiGPO's gradients**": cosine(grpo, gigpo),
        "length of GiGPO's gradient / GRPO's": float(gigpo.norm() / grpo.norm()),
        "cosine of their first AdamW steps": cosine(adam_step(grpo, clip), adam_step(gigpo, clip)),
        "**GRPO on one half of the batch and on the other**": cosine(grpo_1, grpo_2),
        "GiGPO on one half and on the other": cosine(gigpo_1, gigpo_2),
        "GRPO on one half, GiGPO on the other": (cosine(grpo_1, gigpo_2) + cosine(gigpo_1, grpo_2)) / 2,
        "GRPO's first AdamW steps on one half and on the other": cosine(
            adam_step(grpo_1, clip), adam_step(grpo_2, clip)
        ),
        "across: on one half and on the other": cosine(across(gigpo_1, grpo_1), across(gigpo_2, grpo_2)),
    }


def between(firsts: Sequence[torch.Tensor], seconds: Sequence[torch.Tensor]) -> list[float]:
    """For each batch the mean cosine of its vector in ``firsts`` with those of the other batches in ``seconds``."""
    return [float(np.mean([cosine(a, b) for j, b in enumerate(seconds) if j != i])) for i, a in enumerate(firsts)]


def measure(batches: Iterable[DataProto], model: nn.Module, config: PPOTrainerConfig) -> Iterator[list[Figures]]:
    """The figures of the batches so far, after each batch from the second one on."""
    figures, grpo, gigpo = [], [], []
    for rows in batches:
        terms, columns = advantage_terms(rows, config), rows.non_tensor_batch
        parts = gradients(model, rows, terms, halves(columns["uid"]), config)
        grpo, gigpo = [*grpo, parts[:, 0].sum(0)], [*gigpo, parts.sum((0, 1))]
        success = dict(zip(columns["traj_uid"], columns["success_rate"], strict=True))  # by episode
        found = {
            "success": float(np.mean(list(success.values()))),
            "rows": float(len(rows)),
            "correlation of episode and step term, over rows": float(np.corrcoef(terms)[0, 1]),
            "correlation of the episode term and the sum": float(np.corrcoef(terms[0], terms.sum(0))[0, 1]),
        }
        figures.append(found | compare(parts, config.actor_rollout_ref.actor.grad_clip))
        if len(figures) > 1:
            yield [one | other for one, other in zip(figures, compare_batches(grpo, gigpo), strict=True)]


def compare_batches(grpo: Sequence[torch.Tensor], gigpo: Sequence[torch.Tensor]) -> list[Figures]:
    """For each batch the mean cosine of one of its vectors with those of the other batches."""
    rest = list(map(across, gigpo, grpo))
    values = {
        "**GRPO on this batch and on the others**": between(grpo, grpo),
        "GiGPO on this batch and on the others": between(gigpo, gigpo),
        "across: on this batch and on the others": between(rest, rest),
        "across on this batch, GRPO on the others": between(rest, grpo),
    }
    return [dict(zip(values, column, strict=True)) for column in zip(*values.values(), strict=True)]


def table(figures: Sequence[Figures]) -> str:
    """A row a figure, a column a batch, then mean ± standard error over batches."""
    lines = ["| figure | " + " | ".join(str(number + 1) for number in range(len(figures))) + " | mean ± s.e. |"]
    lines.append("| --- " * (len(figures) + 2) + "|")
    for name in figures[0]:
        values, digits = np.array([figure[name] for figure in figures]), 0 if name == "rows" else 3
        cells, error = " | ".join(f"{value:.{digits}f}" for value in values), values.std(ddof=1) / len(values) ** 0.5
        lines.append(f"| {name} | {cells} | {values.mean():.{digits}f} ± {error:.{digits}f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; by default the model that ships with the project")
    parser.add_argument("--batches", type=int, default=6, help="at least 2")
    parser.add_argument("overrides", nargs="*", help="seeds and sizes, such as env.seed=1")
    args = parser.parse_args()
    if args.batches < 2:
        parser.error(f"--batches {args.batches}: a standard error needs at least 2")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = (f"actor_rollout_ref.model.path='{args.model}'",) if args.model else ()
    recipe = [f"algorithm.{value}" for value in ALGORITHM] + [f"actor_rollout_ref.actor.{value}" for value in ACTOR]
    config = default_config(*SET_UP, *recipe, *path, *args.overrides)
    folder, attention = copy_to_local(config.actor_rollout_ref.model.path, key="--model"), register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    install_log_prob_head(model.eval())
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.WARNING)
    try:
        for figures in measure(played(config, model, folder, args.batches), model, config):
            logger.info("\n%s", table(figures))  # after each batch, so that a run cut short says something too
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
