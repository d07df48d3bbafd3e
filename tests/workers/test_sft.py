"""Supervised fine-tuning: learns a tiny set, resumes exactly, exports what it trained."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.ranks import run_ranks
from tests.workers.tiny import save_tiny_model, save_tiny_tokenizer, tiny_config
from verl.trainer import sft_trainer
from verl.trainer.config import ConfigError
from verl.trainer.config.sft_schema import SFTConfig, check
from verl.trainer.config.tool import compose_tool
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.checkpoint.step_folder import TRACKER_FILE
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.tokenizer import hf_tokenizer

YAML = Path(sft_trainer.__file__).parent / "config" / "sft_trainer.yaml"


def _trainer(folder: Path, **changes: Any) -> SFTTrainer:
    defaults = {
        "data.train_files": str(folder / "rows.parquet"),
        "data.val_files": str(folder / "rows.parquet"),
        "data.train_batch_size": 8,
        "data.max_token_len_per_gpu": 60,
        "model.path": str(folder / "model"),
        "optim.lr": 1e-2,
        "trainer.total_epochs": 8,
        "trainer.default_local_dir": str(folder / "run"),
    }
    overrides = [f"{key}={value}" for key, value in {**defaults, **changes}.items()]
    return SFTTrainer(compose_tool(SFTConfig, "sft_trainer", overrides))


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    """Twenty rows whose response repeats the prompt's first tokens, and a config to start from."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 97, rng.integers(4, 12)).tolist() for _ in range(20)]
    table = {"prompt": prompts, "response": [p[:3] + [1] for p in prompts]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    tiny_config().save_pretrained(tmp_path / "model")
    return tmp_path


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_it_learns_a_tiny_set_and_exports_the_model(folder: Path) -> None:
    trainer = _trainer(folder, **{"trainer.total_epochs": 40})
    trainer.fit()
    lines = _metrics(folder / "run")
    assert [line["step"] for line in lines] == list(range(1, 121))
    assert lines[-1]["val/loss"] < 0.2 < 3.0 < lines[0]["train/loss"]
    assert lines[0]["train/lr"] == 0.0 and lines[-1]["train/lr"] < 1e-4
    export = folder / "run" / "huggingface"
    assert len({file.stat().st_mode for file in export.iterdir()}) == 1, "all of it can be read by the same users"
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    prompt, response = trainer.train_data[0]
    logits = model(torch.from_numpy(np.concatenate([prompt, response])).long()[None]).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == response.tolist()


def test_a_run_that_stops_and_resumes_is_bitwise_the_run_that_did_not(folder: Path) -> None:
    _trainer(folder).fit()
    stopped = _trainer(folder, **{"trainer.default_local_dir": str(folder / "other")})
    for _ in range(10):
        stopped.train_step()
    stopped.save()
    resumed = _trainer(folder, **{"trainer.default_local_dir": str(folder / "other")})
    resumed.fit()
    assert resumed.global_step == resumed.total_steps == 24
    first, second = _weights(folder / "run" / "huggingface"), _weights(folder / "other" / "huggingface")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_has_each_step_once_in_its_metrics_and_a_new_one_has_only_its_own(folder: Path) -> None:
    first = _trainer(folder, **{"trainer.total_training_steps": 4, "trainer.save_freq": 2})
    first.fit()
    (folder / "run" / TRACKER_FILE).write_text("2")  # as if it had been killed in step 5
    with (folder / "run" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5, "tr')
    _trainer(folder, **{"trainer.total_training_steps": 6}).fit()
    assert [line["step"] for line in _metrics(folder / "run")] == [1, 2, 3, 4, 5, 6]
    _trainer(folder, **{"trainer.total_training_steps": 1, "trainer.resume_mode": "disable"}).fit()
    assert [line["step"] for line in _metrics(folder / "run")] == [1]


def test_a_save_that_is_cut_short_leaves_the_checkpoint_that_is_named(folder: Path) -> None:
    first = _trainer(folder, **{"trainer.max_ckpt_to_keep": 1})
    first.train_step()
    first.save()
    first.train_step()
    with mock.patch.object(sft_trainer, "write_atomically", side_effect=OSError), pytest.raises(OSError):
        first.save()
    resumed = _trainer(folder)
    resumed.resume()
    assert resumed.global_step == 1
    first.save()
    assert sorted(path.name for path in (folder / "run").glob("global_step_*")) == ["global_step_2"]


def test_a_resumed_run_takes_the_learning_rate_it_is_given(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _trainer(folder)
    for _ in range(5):
        at_the_end = first.train_step()["train/lr"]
    first.save()
    resumed = _trainer(folder, **{"optim.lr": 5e-3})
    with caplog.at_level(logging.WARNING):
        resumed.resume()
    said = [r.getMessage() for r in caplog.records if "in the checkpoint" in r.getMessage()]
    assert said == ["optim.lr: 0.01 in the checkpoint, 0.005 from now on"]
    assert first.global_step == resumed.global_step == 5 and at_the_end > 0
    assert resumed.train_step()["train/lr"] == pytest.approx(first.train_step()["train/lr"] / 2, rel=1e-9)


def _loss_of_a_layered_checkpoint(folder: Path) -> tuple[float, float]:
    place = {"trainer.default_local_dir": str(folder / "layers")}
    with mock.patch.object(sft_trainer, "SMALL_MODEL", 0):
        layered = _trainer(folder, **place)
    for _ in range(5):
        layered.train_step()
    layered.save()
    whole = _trainer(folder, **place)
    whole.resume()
    assert whole.global_step == 5
    return layered.train_step()["train/loss"], whole.train_step()["train/loss"]


def test_a_checkpoint_of_a_model_that_was_sharded_by_layers_goes_on_as_one_unit(folder: Path) -> None:
    for went_on, resumed in run_ranks(_loss_of_a_layered_checkpoint, 2, folder):
        assert went_on == resumed


def _first_steps(folder: Path) -> list[float]:
    trainer = _trainer(folder, **{"trainer.resume_mode": "disable"})
    return [trainer.train_step()["train/loss"] for _ in range(4)] + [trainer.validate()["val/loss"]]


def test_two_ranks_see_the_losses_of_one(folder: Path) -> None:
    alone = _first_steps(folder)
    for rank in run_ranks(_first_steps, 2, folder):
        assert rank == pytest.approx(alone, rel=1e-4)


def test_text_rows_are_tokenised_and_end_with_the_end_token(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w5 w6", "response": "w7"}\n')
    tokenizer = hf_tokenizer(str(tmp_path))
    prompt, response = SFTDataset(str(tmp_path / "rows.jsonl"), tokenizer)[0]
    assert prompt.tolist() == [5, 6] and response.tolist() == [7, 1]
    with pytest.raises(ValueError, match="model.tokenizer_path"):
        SFTDataset(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"prompt": [2], "response": [3]}\n{"prompt": [2', "rows.jsonl, line 2 is no JSON"),
        ("\n[2]\n", "rows.jsonl, line 2 is no JSON object, but [2]"),
        ('{"prompt": [2], "response": [3]}\n{"prompt": [2]}', "response of row 1 is 'None', not a list of token ids"),
        ('{"prompt": [2], "response": "text"}\n{"prompt": [2], "response": [3]}', "not text, as in the first row"),
        ('{"prompt": [2.5], "response": [3]}', "prompt of row 0 is '[2.5]', not a list of token ids"),
        ('{"prompt": [[2], [3]], "response": [3]}', "prompt of row 0 is '[[2], [3]]', not a list of token ids"),
        ('{"prompt": [-2], "response": [3]}', "row 0 has the token id -2; ids count from 0"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=re.escape(said)):
        SFTDataset(str(tmp_path / "rows.jsonl"))


def test_a_cut_parquet_file_and_ids_that_the_model_lacks_are_named(folder: Path) -> None:
    content = (folder / "rows.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cut.parquet is no readable parquet file"):
        SFTDataset(str(folder / "cut.parquet"))
    (folder / "rows.jsonl").write_text('{"prompt": [2], "response": [97, 5000]}\n')
    with pytest.raises(ValueError, match="data.val_files holds the token id 5000, and model.path=.* has the ids 0 to"):
        _trainer(folder, **{"data.val_files": str(folder / "rows.jsonl")})


@pytest.mark.parametrize(
    ("truncation", "prompt", "response"),
    [("left", [4, 5], [6, 7, 8]), ("right", [2, 3, 4, 5], [6])],
)
def test_long_rows_are_cut_where_asked(tmp_path: Path, truncation: str, prompt: list, response: list) -> None:
    (tmp_path / "rows.jsonl").write_text('{"p": [2, 3, 4, 5], "r": [6, 7, 8]}\n')
    make = lambda how: SFTDataset(str(tmp_path / "rows.jsonl"), None, "p", "r", max_length=5, truncation=how)  # noqa: E731
    got = make(truncation)[0]
    assert got[0].tolist() == prompt and got[1].tolist() == response
    with pytest.raises(ValueError, match="data.max_length"):
        make("error")


def test_mistakes_name_the_key(folder: Path) -> None:
    with pytest.raises(ValueError, match="data.prompt_key"):
        _trainer(folder, **{"data.prompt_key": "question"})
    with pytest.raises(ValueError, match="data.train_files"):
        _trainer(folder, **{"data.train_files": "nowhere.parquet"})
    with pytest.raises(ValueError, match="optim.lr_scheduler"):
        _trainer(folder, **{"optim.lr_scheduler": "step"})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.total_epochs=many", "trainer.total_epochs expects a whole number, got 'many'"),
        ("trainer.total_epochs=0", "trainer.total_epochs=0 has to be at least 1"),
        ("trainer.max_ckpt_to_keep=0", "trainer.max_ckpt_to_keep=0 has to be at least 1"),
        ("trainer.seed=-1", "trainer.seed=-1 has to be at least 0"),
        ("trainer.logger=[chalk]", "trainer.logger has 'chalk'"),
        ("trainer.export_dtype=int8", "trainer.export_dtype expects one of bf16, "),
        ("data.truncation=middle", "data.truncation expects one of error, left, right"),
        ("data.max_length=0", "data.max_length=0 has to be at least 2"),
        ("optim.lr=-1e-5", "optim.lr=-1e-05 has to be at least 0"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] has to be two numbers"),
        ("optim.warmup_steps_ratio=5", "optim.warmup_steps_ratio=5 has to lie in [0, 1]"),
        ("optim.momentum=0.9", "There is no setting optim.momentum"),
        ("trainer.export_dir=/dev/null/model", "trainer.export_dir=/dev/null/model: /dev/null is no folder that can be"),
        ("model.lora_rank=-1", "model.lora_rank=-1 has to be at least 0"),
    ],
)
def test_values_that_cannot_work_are_refused_by_their_key(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(compose_tool(SFTConfig, "sft_trainer", [f"data.train_files={YAML}", f"model.path={YAML.parent}", override]))


def test_what_is_not_set_or_not_possible_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        ([], "Configuration error: 2 settings do not work:\n  data.train_files has to be set\n  model.path has to be set\n"),
        (
            ["model.path=m", "data.train_files=f", "optim.lr_scheduler=linear"],
            "Configuration error: optim.lr_scheduler expects one of cosine, constant, got 'linear'\n",
        ),
        (
            ["model.path=m", "data.train_files=missing.parquet"],
            "Configuration error: data.train_files=missing.parquet: there is no such file\n",
        ),
        (
            ["model.path=/nowhere", f"data.train_files=[{YAML}]", "data.val_files=b.jsonl", "model.tokenizer_path=/no"],
            "Configuration error: 3 settings do not work:\n"
            "  data.val_files=b.jsonl: there is no such file\n"
            "  model.path=/nowhere: there is no folder /nowhere; check the path, or use a hub name\n"
            "  model.tokenizer_path=/no: there is no folder /no; use a folder or a hub name\n",
        ),
    ):
        command = [sys.executable, "-m", "verl.trainer.fsdp_sft_trainer", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(YAML.parents[3])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (2, said)
        assert list(tmp_path.iterdir()) == []


def test_the_command_imports_no_torch_before_its_checks() -> None:
    script = "import sys, verl.trainer.fsdp_sft_trainer; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(YAML.parents[3])}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=300).returncode == 0
