"""Sharded checkpoints become Hugging Face folders that are the trained model, or nothing at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.workers.ranks import run_ranks
from tests.workers.tiny import save_tiny_model, save_tiny_tokenizer
from verl.model_merger.__main__ import _stop, main
from verl.model_merger.compare import compare
from verl.model_merger.folder import staged_folder
from verl.model_merger.models import check_tokenizer
from verl.model_merger.shards import open_shards
from verl.model_merger.state import adapter_scale
from verl.models.build import ModelSpec, build_model
from verl.models.lora import LoraSettings
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh
from verl.utils.tokenizer import hf_tokenizer

LORA = LoraSettings(rank=4, alpha=8)
IDS = torch.arange(2, 12)[None]


def _save(base: str, folder: str, lora: LoraSettings | None, kind: str, change: bool) -> dict[str, torch.Tensor]:
    """Build a model on these ranks, change what is trained, save it; the full parameters by name."""
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    model = build_model(ModelSpec(base, lora=lora, kind=kind), mesh, ShardingOptions())
    if change:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    local = parameter.to_local()
                    local += 0.01 * torch.arange(1, local.numel() + 1).reshape(local.shape).sin()
                    assert name
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    manager = FSDPCheckpointManager(
        model, optimizer, None, hf_tokenizer(base), contents=("model", "optimizer", "extra"), lora=lora, base_path=base
    )
    manager.save_checkpoint(folder, global_step=1)
    return {name: tensor.clone() for name, tensor in full_parameters(model)}


def _save_all(base: str, root: str) -> dict[str, dict[str, torch.Tensor]]:
    """Every checkpoint that the tests read, on the ranks there are."""
    states = {}
    for name, lora, kind, change in (
        ("full", None, "causal_lm", True),
        ("lora", LORA, "causal_lm", True),
        ("untrained", None, "causal_lm", False),
        ("critic", None, "value", True),
    ):
        states[name] = _save(base, f"{root}/{name}/global_step_1/actor", lora, kind, change)
    mesh = create_device_mesh(dist.get_world_size(), -1, "cpu")
    module = build_model(ModelSpec(base), mesh, ShardingOptions())
    os.makedirs(f"{root}/ranks", exist_ok=True)
    torch.save(module.state_dict(), f"{root}/ranks/model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    return states


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """``(folder of checkpoints, full parameters of each)``, written by two ranks."""
    root = tmp_path_factory.mktemp("two_ranks")
    return root, run_ranks(_save_all, 2, base, str(root))[0]


@pytest.fixture
def copied(saved: tuple[Path, dict], tmp_path: Path) -> Iterator[Path]:
    """A checkpoint that a test may damage."""
    folder = tmp_path / "global_step_1" / "actor"
    shutil.copytree(saved[0] / "full" / "global_step_1" / "actor", folder)
    yield folder


def actor(saved: tuple[Path, dict], name: str) -> Path:
    return saved[0] / name / "global_step_1" / "actor"


def refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], target: Path | None = None) -> None:
    """The command ends with 1 and one line with ``said``, and leaves nothing beside ``target``."""
    before = sorted(target.parent.iterdir()) if target is not None else []
    assert main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("model_merger: ") and said in error, error
    assert target is None or sorted(target.parent.iterdir()) == before


def test_the_folder_is_the_trained_model(saved, base, tmp_path, capsys):
    assert main(["merge", "--local_dir", str(actor(saved, "full")), "--target_dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "26 of 26 tensors differ" in said  # the tied head is one tensor with the embedding
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert compare(dict(model.named_parameters()), saved[1]["full"]).none
    assert hf_tokenizer(str(tmp_path / "out")).encode("w5 w7") == [5, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "usual").touch()
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {(tmp_path / "usual").stat().st_mode}
    start = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    largest = max(
        float((tensor - start[name].detach()).abs().max())
        for name, tensor in saved[1]["full"].items()
    )
    assert f"at most by {largest:.3g}" in said


def test_the_written_dtype_is_the_bases_or_the_one_asked_for(saved, tmp_path):
    arguments = ["merge", "--local_dir", str(actor(saved, "full")), "--target_dir", str(tmp_path / "half")]
    assert main([*arguments, "--dtype", "bf16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in saved[1]["full"].items()}
    assert model.dtype == torch.bfloat16 and compare(dict(model.named_parameters()), expected).none


def test_adapters_are_merged_or_kept_and_both_are_the_same_model(saved, base, tmp_path, capsys):
    folder = str(actor(saved, "lora"))
    assert main(["merge", "--local_dir", folder, "--target_dir", str(tmp_path / "merged")]) == 0
    assert "14 of 26 tensors differ" in capsys.readouterr().out  # seven linear layers in each of two blocks
    assert main(["merge", "--local_dir", folder, "--target_dir", str(tmp_path / "kept"), "--lora", "keep"]) == 0
    assert "14 of 14 tensors differ" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "kept")
    torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, atol=1e-4, rtol=1e-4)
    layer = "model.layers.1.mlp.up_proj"
    state = saved[1]["lora"]
    by_hand = state[f"{layer}.base_layer.weight"] + 2.0 * (
        state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
    )  # W + alpha / rank · B A
    torch.testing.assert_close(dict(merged.named_parameters())[f"{layer}.weight"].data, by_hand)


def test_a_critic_keeps_its_value_head(saved, tmp_path, capsys):
    assert main(["merge", "--local_dir", str(actor(saved, "critic")), "--target_dir", str(tmp_path / "out")]) == 0
    assert "only in the first (score" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen2ForTokenClassification"]


def test_rank_files_of_the_other_layout_are_read(saved, base, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(base) / name, saved[0] / "ranks" / name)
    assert main(["merge", "--local_dir", str(saved[0] / "ranks"), "--target_dir", str(tmp_path / "out"), "--base_model", "none"]) == 0
    assert main(["test", "--local_dir", str(saved[0] / "ranks"), "--test_hf_dir", base, "--atol", "0.01"]) == 0
    reader = open_shards(saved[0] / "ranks")
    whole = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    assert compare(reader.load(whole), whole).none


def test_the_test_command_tells_equal_from_different(saved, base, tmp_path, capsys):
    folder = str(actor(saved, "lora"))
    assert main(["merge", "--local_dir", folder, "--target_dir", str(tmp_path / "merged")]) == 0
    assert main(["test", "--local_dir", folder, "--test_hf_dir", str(tmp_path / "merged")]) == 0
    assert main(["test", "--local_dir", folder, "--test_hf_dir", base]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NOT the same model"


def test_an_untrained_model_is_refused_and_nothing_is_left(saved, tmp_path, capsys):
    arguments = ["merge", "--local_dir", str(actor(saved, "untrained")), "--target_dir", str(tmp_path / "out")]
    refused(arguments, "nothing differs from", capsys, tmp_path / "out")


def test_a_missing_base_names_the_option(copied, tmp_path, capsys):
    (copied / "checkpoint.json").unlink()
    arguments = ["merge", "--local_dir", str(copied), "--target_dir", str(tmp_path / "out")]
    refused(arguments, "--base_model none", capsys, tmp_path / "out")
    (copied.parent.parent / "resolved_config.yaml").write_text("actor_rollout_ref: {model: {path: /not/here}}")
    refused(arguments, "/not/here", capsys, tmp_path / "out")
    assert main([*arguments, "--base_model", "none"]) == 0


def _without_a_rank(folder: Path) -> str:
    (folder / "dist_ckpt" / "__1_0.distcp").unlink()
    return "lacks 1 of 2 files (__1_0.distcp)"


def _truncated(folder: Path) -> str:
    file = folder / "dist_ckpt" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    return "is truncated"


def _without_metadata(folder: Path) -> str:
    (folder / "dist_ckpt" / ".metadata").unlink()
    return ".metadata is missing"


def _with_half_of_the_metadata(folder: Path) -> str:
    file = folder / "dist_ckpt" / ".metadata"
    os.truncate(file, file.stat().st_size // 2)
    return ".metadata is damaged"


def _overwritten(folder: Path) -> str:
    file = folder / "dist_ckpt" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    return "is damaged"


def _of_another_model(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    return "are missing in the checkpoint"


def _without_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "has no config.json"


def _never_finished(folder: Path) -> str:
    folder.rename(folder.with_name("actor.tmp"))
    return "no such folder"


@pytest.mark.parametrize(
    "damage",
    [
        _without_a_rank,
        _truncated,
        _without_metadata,
        _with_half_of_the_metadata,
        _overwritten,
        _of_another_model,
        _without_config,
        _never_finished,
    ],
)
def test_damaged_checkpoints_are_named_and_leave_nothing(copied, tmp_path, capsys, damage):
    said = damage(copied)
    arguments = ["merge", "--local_dir", str(copied), "--target_dir", str(tmp_path / "out")]
    refused(arguments, said, capsys, tmp_path / "out")


def test_missing_rank_files_and_wrong_folders_are_named(saved, tmp_path, capsys):
    def command(folder: Path) -> list[str]:
        return ["merge", "--local_dir", str(folder), "--target_dir", str(tmp_path / "out")]

    refused(command(actor(saved, "full").parent), f"did you mean {actor(saved, 'full')}?", capsys)
    (tmp_path / "empty").mkdir()
    refused(command(tmp_path / "empty"), "holds no sharded model", capsys)
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(saved[0] / "ranks" / "model_world_size_2_rank_1.pt", part)
    refused(command(part), "lacks the files of 1 of 2 ranks (rank 0)", capsys)
    (part / "model_world_size_2_rank_0.pt").write_bytes(b"PK nothing")
    refused(command(part), "is damaged", capsys)
    unfinished = tmp_path / "global_step_2.tmp" / "actor"
    unfinished.mkdir(parents=True)
    refused(command(unfinished), "never finished", capsys)


def test_a_full_target_and_a_full_disk_are_refused(saved, tmp_path, capsys, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("kept")
    arguments = ["merge", "--local_dir", str(actor(saved, "full")), "--target_dir", str(target)]
    refused(arguments, "is not empty", capsys, target)
    assert (target / "mine.txt").read_text() == "kept"
    (target / "mine.txt").unlink()
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(arguments, "GiB are needed", capsys, target)
    usage.free = 1 << 40
    with pytest.raises(ValueError, match="disk is full"), staged_folder(target, 0) as staging:
        (staging / "half.bin").write_bytes(b"half")
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(SystemExit), staged_folder(target, 0) as staging:
        (staging / "half.bin").write_bytes(b"half")
        _stop(signal.SIGTERM, None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not any(target.iterdir())
    monkeypatch.undo()
    assert main(arguments) == 0  # an empty folder is taken


def test_a_tokenizer_that_transformers_misreads_is_named(tmp_path, caplog):
    for file in Path(copy_to_local("pkg://agent_system.environments.env_package.webshop/embedded_model")).iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path)
    assert check_tokenizer(tmp_path, trust_remote_code=False)
    assert "Load it with transformers.PreTrainedTokenizerFast" in caplog.text
    right = PreTrainedTokenizerFast.from_pretrained(tmp_path)("Red shoes")["input_ids"]
    assert right == hf_tokenizer(str(tmp_path))("Red shoes")["input_ids"]
    assert right != AutoTokenizer.from_pretrained(tmp_path)("Red shoes")["input_ids"]
    caplog.clear()
    (tmp_path / "config.json").unlink()  # the other remedy
    assert check_tokenizer(tmp_path, trust_remote_code=False) and not caplog.text
    assert right == AutoTokenizer.from_pretrained(tmp_path)("Red shoes")["input_ids"]


def test_keep_needs_adapters_and_a_scale(saved, tmp_path, capsys):
    arguments = ["merge", "--local_dir", str(actor(saved, "full")), "--target_dir", str(tmp_path / "out")]
    refused([*arguments, "--lora", "keep"], "has no LoRA adapters", capsys, tmp_path / "out")
    refused([*arguments, "--backend", "megatron"], "no Megatron backend", capsys, tmp_path / "out")
    with pytest.raises(ValueError, match="which has their scale"):
        adapter_scale(tmp_path)
    (tmp_path / "lora_adapter").mkdir()
    settings = tmp_path / "lora_adapter" / "adapter_config.json"
    settings.write_text('{"r": 4, "lora_alpha": 8, "use_rslora": true}')
    assert adapter_scale(tmp_path) == 4.0  # alpha / sqrt(rank)
    settings.write_text('{"r": 4, "lora_alpha": 8, "use_dora": true}')
    with pytest.raises(ValueError, match="use_dora"):
        adapter_scale(tmp_path)


def test_differences_are_counted_by_hand():
    first = {"a": torch.tensor([1.0, 2.0, 4.0]), "b": torch.tensor([3.0]), "c": torch.zeros(2), "only": torch.zeros(1)}
    second = {"a": torch.tensor([1.0, 2.0, 2.0]), "b": torch.tensor([3.0]), "c": torch.zeros(3)}
    found = compare(first, second)
    assert (found.changed, found.changed_elements, found.elements) == ({"a": 2.0}, 1, 4)
    assert found.relative == pytest.approx(2 / (1 + 4 + 4 + 9) ** 0.5)
    assert (found.only_first, found.reshaped, found.same_names) == (["only"], ["c"], False)
    assert not compare({"x": torch.tensor([float("nan")])}, {"x": torch.tensor([float("nan")])}).none
    half = torch.tensor([1.001]).to(torch.bfloat16)
    assert compare({"x": half}, {"x": torch.tensor([1.001])}).none  # a change of dtype alone is none


def _scores_of_vllm(folder: str, tokens: list[int]) -> list[float]:
    from verl.workers.rollout.settings import EngineSettings
    from verl.workers.rollout.vllm_rollout import VLLMRollout

    engine = VLLMRollout(
        EngineSettings(folder, load_format="auto", eos_token_ids=(1,), max_model_len=64, max_num_seqs=4)
    )
    return engine.score([np.array(tokens, dtype=np.int32)])[0].tolist()


@pytest.mark.slow
@pytest.mark.recipes
def test_vllm_loads_the_folder_and_computes_the_same_model(saved, tmp_path):
    pytest.importorskip("vllm")
    assert main(["merge", "--local_dir", str(actor(saved, "lora")), "--target_dir", str(tmp_path / "out")]) == 0
    tokens = list(range(2, 22))
    scores = run_ranks(_scores_of_vllm, 1, str(tmp_path / "out"), tokens)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    log_probs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = log_probs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=2e-4, rtol=1e-4)


def test_an_upload_that_fails_keeps_the_folder(saved, tmp_path, capsys, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, **options):
            calls.append(options)
            return "https://hub/me/model"

        def upload_folder(self, **options):
            calls.append(options)
            if options["repo_id"] == "me/broken":
                raise ConnectionError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    target = tmp_path / "out"
    arguments = ["merge", "--local_dir", str(actor(saved, "full")), "--target_dir", str(target)]
    assert main([*arguments, "--hf_upload_path", "me/broken", "--private"]) == 1
    assert "401 Unauthorized. The folder" in capsys.readouterr().err and (target / "config.json").is_file()
    assert calls[0] == {"repo_id": "me/broken", "private": True, "exist_ok": True}
    shutil.rmtree(target)
    assert main([*arguments, "--hf_upload_path", "me/model"]) == 0
    assert "uploaded to https://hub/me/model" in capsys.readouterr().out
    assert calls[-1]["folder_path"] == str(target)
