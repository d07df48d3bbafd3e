"""The parquet shell, its dataset and the batches made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from examples.data_preprocess import prepare
from verl.trainer.config import default_config
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn


class WordTokenizer:
    """A token a word; the chat template is the contents and one closing word."""

    pad_token_id, eos_token_id = 0, 1

    def apply_chat_template(self, chat, add_generation_prompt: bool, tokenize: bool, **kwargs) -> str:
        return " ".join([*(message["content"] for message in chat), kwargs.get("closing", "go")])

    def __call__(self, text: str, add_special_tokens: bool) -> dict:
        return {"input_ids": [2 + len(word) for word in text.split()]}


def write(path: Path, prompts: list[str]) -> str:
    import pyarrow as pa

    rows = [{"data_source": "text", "prompt": [{"role": "user", "content": text}],
             "extra_info": {"index": index + 100}} for index, text in enumerate(prompts)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def data(**values):
    import dataclasses

    return dataclasses.replace(default_config().data, **values)


def test_the_text_shell(tmp_path: Path) -> None:
    arguments = ["--mode", "text", "--local_dir", str(tmp_path), "--train_data_size", "3", "--val_data_size", "2"]
    assert prepare.main(arguments) == 0
    rows = pq.read_table(tmp_path / "text" / "train.parquet").to_pylist()
    assert rows == [{"data_source": "text", "prompt": [{"content": "", "role": "user"}], "ability": "agent",
                     "extra_info": {"index": index, "split": "train"}} for index in range(3)]
    before = (tmp_path / "text" / "test.parquet").stat().st_mtime_ns
    assert prepare.main([*arguments, "--hdfs_dir", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "text" / "test.parquet").stat().st_mtime_ns == before
    assert pq.read_metadata(tmp_path / "copy" / "text" / "test.parquet").num_rows == 2
    assert sorted(path.name for path in (tmp_path / "text").iterdir()) == ["test.parquet", "train.parquet"]


def test_the_visual_shell_has_a_blank_image(tmp_path: Path) -> None:
    prepare.main(["--local_dir", str(tmp_path), "--train_data_size", "1", "--val_data_size", "1"])
    (row,) = pq.read_table(tmp_path / "visual" / "train.parquet").to_pylist()
    assert row["prompt"][0]["content"] == "<image>" and row["images"][0]["bytes"].startswith(b"\x89PNG")
    dataset = RLHFDataset(str(tmp_path / "visual" / "train.parquet"), WordTokenizer(), data(), processor=object())
    (image,) = dataset[0]["multi_modal_data"]["image"]
    assert image.size == (32, 32)


def test_sizes_have_to_be_positive(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare.main(["--mode", "text", "--local_dir", str(tmp_path), "--train_data_size", "0"])
    assert caught.value.code == 2 and "--train_data_size=0 has to be at least 1" in capsys.readouterr().err


def test_help_says_the_defaults_and_the_mode_of_text_models(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no name is broken over lines
    with pytest.raises(SystemExit) as caught:
        prepare.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0 and said.count("(default: 256)") == 2
    assert "LOCAL_DIR/MODE/ (default: ~/data/verl-agent/)" in said
    assert "models that read text only need text (default: visual" in said


def test_rows_of_the_dataset(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.parquet", ["one two", "three"]), write(tmp_path / "b.parquet", ["four"])]
    dataset = RLHFDataset(files, WordTokenizer(), data(max_prompt_length=5, apply_chat_template_kwargs={"closing": "x y"}))
    assert len(dataset) == 3
    row = dataset[0]
    assert row["raw_prompt_ids"] == [5, 5, 3, 3]
    assert row["input_ids"].tolist() == [0, 5, 5, 3, 3]
    assert row["attention_mask"].tolist() == [0, 1, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 0, 1, 2, 3]
    assert row["raw_prompt"] == [{"role": "user", "content": "one two"}]
    assert (row["index"], row["data_source"], row["tools_kwargs"]) == (100, "text", {})
    assert dataset[-1]["raw_prompt"][0]["content"] == "four"
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", [5, 6, 4]), ("right", [3, 4, 5]), ("middle", [3, 6, 4]), ("shorten_history", [5, 6, 4])],
)
def test_truncation(tmp_path: Path, truncation: str, kept: list[int]) -> None:
    path = write(tmp_path / "a.parquet", ["a bb ccc dddd"])
    dataset = RLHFDataset(path, WordTokenizer(), data(max_prompt_length=3, truncation=truncation))
    assert dataset[0]["raw_prompt_ids"] == kept


def test_long_prompts_raise_or_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["a bb ccc dddd", "a"])
    with pytest.raises(ValueError, match="raise it, or use data.filter_overlong_prompts=true"):
        RLHFDataset(path, WordTokenizer(), data(max_prompt_length=3))[0]
    dataset = RLHFDataset(path, WordTokenizer(), data(max_prompt_length=3, filter_overlong_prompts=True))
    assert len(dataset) == 1 and dataset[0]["index"] == 101


def test_bad_files_are_named_with_what_writes_good_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.parquet .*prepare.py"):
        RLHFDataset(str(tmp_path / "nowhere.parquet"), WordTokenizer(), data())
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"bad.parquet is no readable parquet file .*prepare.py"):
        RLHFDataset(str(tmp_path / "bad.parquet"), WordTokenizer(), data())
    with pytest.raises(ValueError, match=r"no column 'question' \(data.prompt_key\)"):
        RLHFDataset(write(tmp_path / "a.parquet", ["a"]), WordTokenizer(), data(prompt_key="question"))


def test_collate() -> None:
    rows = [{"ids": torch.tensor([index, 1]), "chat": [{"role": "user"}], "name": str(index)} for index in range(3)]
    batch = collate_fn(rows)
    assert batch["ids"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert isinstance(batch["chat"], np.ndarray) and batch["chat"].shape == (3,) and batch["chat"].dtype == object
    assert batch["name"].tolist() == ["0", "1", "2"]
