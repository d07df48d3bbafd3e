"""Small pure functions of the worker rooms against formulas and worked values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GPT2Config, MixtralConfig, Qwen2Config, Qwen2MoeConfig

from verl.models.micro_batches import split_by_rows, split_by_tokens, split_evenly
from verl.protocol import DataProto
from verl.utils import torch_functional as F
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.fsdp_utils import to_torch_dtype
from verl.utils.lr_schedule import warmup_steps
from verl.utils.model import compute_position_id_with_mask, create_random_mask, update_model_config
from verl.workers.guarded_step import GuardedOptimizer
from verl.workers.rows import RaggedRows
from verl.workers.skipped_batch import keep_skipped


def _factors(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    values = []
    for _ in range(steps):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


def test_cosine_schedule() -> None:
    got = _factors(lambda o: F.get_cosine_schedule_with_warmup(o, 2, 10, min_lr_ratio=0.1), 11)
    expected = [0.1, 0.55, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1]
    assert got == pytest.approx(expected, abs=1e-6)


def test_constant_schedule() -> None:
    assert _factors(lambda o: F.get_constant_schedule_with_warmup(o, 3), 5) == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert _factors(lambda o: F.get_constant_schedule_with_warmup(o, 0), 2) == [1, 1]


def test_warmup_stable_decay_schedule() -> None:
    got = _factors(lambda o: F.get_wsd_schedule_with_warmup(o, 2, 12, stable_ratio=0.5), 13)
    assert got[:8] == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 1])
    assert got[12] == pytest.approx(0.0)
    assert all(a >= b for a, b in zip(got[7:], got[8:]))


def test_warmup_length_is_absolute_or_a_ratio() -> None:
    assert warmup_steps(-1, 0.1, 200) == 20
    assert warmup_steps(5, 0.1, 200) == 5


def test_masked_statistics() -> None:
    values, mask = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    chosen = values[mask.bool()]
    assert F.masked_mean(values, mask).item() == pytest.approx(chosen.mean().item())
    assert F.masked_var(values, mask).item() == pytest.approx(chosen.var().item(), rel=1e-5)
    assert F.masked_sum(values, mask, axis=1).tolist() == [3, 15]
    expected = torch.tensor([[-1.253831, -0.771588, -0.289346], [0.192897, 0.675140, 1.157383]])
    torch.testing.assert_close(F.masked_whiten(values, mask), expected, atol=1e-5, rtol=1e-5)
    shifted = F.masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(shifted, expected + chosen.mean(), atol=1e-5, rtol=1e-5)
    for bad in (torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        with pytest.raises(ValueError):
            F.masked_var(values, bad)


def test_what_is_masked_does_not_leak() -> None:
    values, mask = torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([1, 0, 0])
    assert F.masked_mean(values, mask).item() == pytest.approx(1.0)


def test_response_mask_ends_with_the_first_end_token() -> None:
    ids = torch.tensor([[20, 10, 34, 1, 0, 0, 0], [78, 0, 76, 2, 1, 0, 0], [23, 98, 1, 0, 0, 0, 0], [5, 6, 7, 8, 9, 3, 4]])
    assert F.get_response_mask(ids, eos_token=1).tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
    assert F.get_response_mask(ids, eos_token=[1, 2])[1].tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_log_probs_and_entropy_from_logits() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    table = torch.log_softmax(logits, -1)
    torch.testing.assert_close(F.logprobs_from_logits(logits, labels), F.logprobs_from_logits_naive(logits, labels))
    torch.testing.assert_close(F.entropy_from_logits(logits), -(table.exp() * table).sum(-1))
    response = F.log_probs_from_logits_response(labels, logits, 3)
    torch.testing.assert_close(response, F.gather_from_labels(table[:, 1:4], labels[:, 2:]))


@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])]
)
def test_postprocess_cuts(truncation: str, expected: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    got, mask = F.postprocess_data(ids, torch.ones_like(ids), 3, 0, truncation=truncation)
    assert got.tolist() == [expected] and mask.tolist() == [[1, 1, 1]]


def test_postprocess_pads_or_refuses() -> None:
    ids = torch.tensor([[1, 2]])
    assert F.postprocess_data(ids, torch.ones_like(ids), 4, 9)[0].tolist() == [[9, 9, 1, 2]]
    assert F.postprocess_data(ids, torch.ones_like(ids), 4, 9, left_pad=False)[1].tolist() == [[1, 1, 0, 0]]
    with pytest.raises(NotImplementedError):
        F.postprocess_data(ids, torch.ones_like(ids), 1, 0)


def test_padding_helpers() -> None:
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=1).tolist() == [[1, 0], [2, 3]]
    indices, cumulative, longest = F.get_unpad_data(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    assert (indices.tolist(), cumulative.tolist(), longest) == ([1, 2, 3], [0, 2, 3], 2)
    assert F.remove_pad_token(torch.tensor([[0, 5]]), torch.tensor([[0, 1]])) == [[5]]


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 40, rng.integers(1, 60)).tolist()
        groups = split_by_tokens(lengths, 50)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in group) <= 50 for group in groups)
        assert len(groups) <= 2 * -(-sum(lengths) // 50)
    assert split_by_tokens([80, 3], 50) == [[0], [1]]
    assert split_by_tokens([4, 2, 2, 2], 8) == [[0, 3], [1, 2]]  # filled one after the other: 8 and 2
    assert split_by_tokens([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]  # dealt evenly, one would have 7
    lengths = rng.integers(400, 1000, 32).tolist()
    sums = [sum(lengths[i] for i in group) for group in split_by_tokens(lengths, int(0.75 * sum(lengths)))]
    assert len(sums) == 2 and max(sums) - min(sums) < 0.05 * sum(sums)
    assert split_by_tokens([], 50) == []
    assert split_by_rows(5, 2) == [[0, 1], [2, 3], [4]]


def test_groups_of_so_many_rows_are_few_and_of_similar_size() -> None:
    assert split_evenly([5, 3, 4, 2], 2) == [[0, 3], [1, 2]]
    assert split_evenly([], 2) == [] and split_evenly([7], 2) == [[0]]
    rng = np.random.default_rng(0)
    for count in (1, 31, 32, 33):
        lengths = rng.integers(400, 1000, count).tolist()
        groups = split_evenly(lengths, 8)
        assert sorted(index for group in groups for index in group) == list(range(count))
        assert len(groups) == -(-count // 8) and max(map(len, groups)) <= 8
        assert groups == sorted(groups) and all(group == sorted(group) for group in groups)
    lengths = rng.integers(400, 1000, 32).tolist()
    sums, neighbours = (
        [sum(lengths[i] for i in group) for group in groups]
        for groups in (split_evenly(lengths, 8), split_by_rows(32, 8))
    )
    assert max(sums) - min(sums) < 0.1 * sum(sums) / 4 < max(neighbours) - min(neighbours)


def test_a_group_has_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        split_evenly([1], 0)
    with pytest.raises(ValueError, match="must be positive"):
        split_by_tokens([1], 0)


def test_flops_of_a_known_shape() -> None:
    config = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
    )
    counter = FlopsCounter(config)
    # Qwen2.5-1.5B has 1.31 G non-embedding parameters, biases and norms (0.1 %) included.
    assert 28 * counter.layer_parameters() == pytest.approx(1.31e9, rel=0.01)
    dense = counter.training_flops([1], head_tokens=0)
    assert dense == pytest.approx(6 * 28 * counter.layer_parameters(), rel=1e-3)
    head = counter.training_flops([100], 100) - counter.training_flops([100], 0)
    assert head == 6 * 100 * 1536 * 151936
    attention = counter.training_flops([1000], 0) - 1000 / 2 * counter.training_flops([1, 1], 0)
    assert attention == pytest.approx(6 * 28 * 1536 * 1000**2, rel=1e-2)


def test_flops_of_experts_are_those_of_the_ones_that_a_token_goes_to() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 97}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    for config in (
        Qwen2Config(**sizes, intermediate_size=96, num_hidden_layers=1),
        MixtralConfig(**sizes, intermediate_size=96, num_hidden_layers=1, num_experts_per_tok=3),
        Qwen2MoeConfig(**sizes, **experts, num_hidden_layers=1, num_experts=8, shared_expert_intermediate_size=40),
        Glm4MoeConfig(**sizes, **experts, num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=2),
    ):
        with torch.device("meta"):
            (layer,) = AutoModelForCausalLM.from_config(config).model.layers
        weights = 0.0
        for name, weight in layer.named_parameters():
            if "gate.weight" in name:  # chooses experts, or says how much of the shared ones
                continue
            share = config.num_experts_per_tok / len(weight) if weight.dim() == 3 else 1
            weights += share * weight.numel() * (weight.dim() > 1)
        assert FlopsCounter(config).layer_parameters() == weights, config.model_type


def test_a_family_that_does_not_name_the_size_of_its_mlp_has_figures_too() -> None:
    assert FlopsCounter(GPT2Config(n_embd=64, n_head=2)).layer_parameters() == 64 * 32 * 8 + 3 * 64 * 256


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A4000", float("inf")),  # no A40
        ("Ascend 910B3", 354.0),
        ("a CPU", float("inf")),
    ],
)
def test_peaks_by_device_name(name: str, tera: float) -> None:
    """Dense bf16 with float32 accumulation, by the vendors' data sheets; no name is taken for a shorter one."""
    assert get_device_flops("T", name) == tera
    assert get_device_flops("G", name) == pytest.approx(1000 * tera)


def test_dtypes_by_name() -> None:
    assert to_torch_dtype("bf16") is torch.bfloat16 and to_torch_dtype(torch.float16) is torch.float16
    with pytest.raises(ValueError, match="model_dtype"):
        to_torch_dtype("int4")


def test_model_config_overrides_descend() -> None:
    config = Qwen2Config()
    update_model_config(config, {"eos_token_id": 7, "rope_parameters": {"rope_theta": 5.0}})
    assert config.eos_token_id == 7 and config.rope_parameters["rope_theta"] == 5.0


def test_positions_and_random_masks() -> None:
    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    mask = create_random_mask(torch.ones(64, 20, dtype=torch.int64), 0.6, 0.3, 0.2)
    lengths = mask.sum(-1)
    assert lengths.min() >= 4 and lengths.max() <= 12
    assert (mask.diff(dim=1).abs().sum(-1) <= 2).all()


def test_ragged_rows_keep_holes_of_the_mask() -> None:
    prompts = np.empty(2, dtype=object)
    prompts[:] = [np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)]
    data = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]),
        },
        non_tensors={"prompt_ids": prompts},
    )
    rows = RaggedRows(data)
    assert [r.tolist() for r in rows.responses] == [[1, 2, 3], []]
    assert rows.lengths.tolist() == [5, 1]


def test_a_good_step_resets_the_count_of_bad_ones() -> None:
    weight = torch.nn.Linear(1, 1, bias=False)
    guard = GuardedOptimizer(weight, torch.optim.SGD(weight.parameters(), lr=0.1), grad_clip=1.0)
    for bad in (True, True, False, True, True):
        weight.weight.grad = torch.tensor([[float("nan") if bad else 2.0]])
        kept = []
        norm, taken = guard.step(torch.tensor(1.0), on_skip=lambda: kept.append("batch"))  # noqa: B023
        assert taken is not bad
        assert kept == ["batch"] * bad
    assert guard.skipped_steps == 4
    assert torch.isfinite(weight.weight).all()
    assert weight.weight.grad is None


def test_a_skipped_mini_batch_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = np.empty(3, dtype=object)
    prompts[:] = [np.arange(n, dtype=np.int32) for n in (1, 2, 3)]
    data = DataProto.from_dict(
        tensors={"advantages": torch.tensor([[1.0], [float("nan")], [3.0]]), "mini_batch": torch.tensor([0, 4, 4])},
        non_tensors={"prompt_ids": prompts},
        meta_info={"temperature": 1.0, "global_steps": 7, "skipped_dir": str(tmp_path / "nonfinite")},
    )
    path = keep_skipped(data, np.array([1, 2]), "actor")
    assert path == tmp_path / "nonfinite" / "step_7_actor_mini_4_rank_0.pt"
    kept = torch.load(path, weights_only=False)
    assert kept["tensors"]["advantages"][:, 0].isnan().tolist() == [True, False]
    assert [len(ids) for ids in kept["columns"]["prompt_ids"]] == [2, 3]
    assert kept["meta"]["temperature"] == 1.0

    data.meta_info["skipped_dir"] = str(path)  # a file: no folder can be made there
    assert keep_skipped(data, np.array([0]), "actor") is None
    assert "could not be kept" in caplog.text
    del data.meta_info["skipped_dir"]
    assert keep_skipped(data, np.array([0]), "actor") is None
