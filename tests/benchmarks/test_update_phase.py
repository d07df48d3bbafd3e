"""The profile of an update counts what happened, and the benchmark runs with several micro-batch sizes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from benchmarks.shapes import shape_config
from benchmarks.update_phase import RowSizes, make_rows, parse_arguments, rows_within, true_lengths
from verl.utils.profiling import busy_seconds, count_events, host_events_in, longest_gaps, profile_call


def test_overlapping_kernels_count_once() -> None:
    assert busy_seconds([]) == 0
    assert busy_seconds([(7e6, 8e6), (0, 4e6), (1e6, 2e6), (3e6, 5e6)]) == pytest.approx(6)


def test_the_longest_waits_are_found_with_what_the_host_did() -> None:
    assert longest_gaps([]) == longest_gaps([(0, 4), (1, 2)]) == []
    assert longest_gaps([(9, 10), (0, 4), (2, 5), (7, 8), (14, 15)], count=2) == [(5, 7), (10, 14)]
    events = [(0, 100, "step"), (5, 6.5, "clip"), (6.5, 9, "forward"), (6.9, 7, "forward"), (7, 8, "later")]
    assert host_events_in((5, 7), events) == ["clip", "forward"]
    assert host_events_in((5, 7), events, count=1) == ["clip"]


def test_events_are_counted_by_group() -> None:
    entries = [
        SimpleNamespace(key=key, count=count, cpu_time_total=microseconds)
        for key, count, microseconds in (
            ("cudaLaunchKernel", 7, 2e6),
            ("cuLaunchKernelEx", 2, 1e6),
            ("FSDP::pre_forward (layers.0)", 3, 4e6),
            ("FSDP::all_gather", 3, 9e6),  # inside of the former
            ("aten::mm", 5, 1e6),
        )
    ]
    found = count_events(entries)
    assert found["kernel_launches"] == (9, 3.0)
    assert found["fsdp_hooks"] == (3, 4.0)
    assert found["malloc"] == (0, 0.0)


def test_a_profile_names_the_operations(tmp_path: Path) -> None:
    path = tmp_path / "made" / "profile.txt"
    value = torch.ones(3)
    figures = profile_call(lambda: [value.sum().item() for _ in range(4)], path, "four sums", torch.device("cpu"))
    text = path.read_text(encoding="utf-8")
    assert figures["item"] == 4 and figures["cuda_busy_s"] == 0
    assert text.startswith("four sums\nwall s") and "aten::sum" in text and "fsdp hooks" in text
    assert not [word for word in ("cuda", "kernel launches", "copies  ", "synchronise", "malloc") if word in text]


def test_a_trace_takes_no_other_disk_than_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    profile_call(lambda: torch.ones(3).sum(), tmp_path / "sum.txt", "a sum", torch.device("cpu"), trace=True)
    with gzip.open(tmp_path / "sum.json.gz", "rt", encoding="utf-8") as file:
        assert "aten::sum" in {event["name"] for event in json.load(file)["traceEvents"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sum.json.gz", "sum.txt"]


def test_a_trace_that_the_profiler_could_not_write_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "export_chrome_trace", lambda *_: None)  # what it does on a full disk
    profile_call(lambda: torch.ones(3).sum(), tmp_path / "sum.txt", "a sum", torch.device("cpu"), trace=True)
    assert "could not be written" in caplog.text and str(tmp_path / "sum.json.gz") in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["sum.txt"]


def test_a_profile_names_the_threads_that_compute(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"

    def burn() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.2:
            pass

    stop = threading.Event()
    helper = threading.Thread(target=lambda: (burn(), stop.wait(60)), name="a busy helper", daemon=True)
    profile_call(lambda: (helper.start(), burn(), time.sleep(0.5)), path, "threads", torch.device("cpu"))
    stop.set()
    listed = path.read_text(encoding="utf-8").partition("seconds of CPU\n")[2].splitlines()
    assert any(line.startswith("a busy helper") for line in listed[:4])


def test_rows_have_the_sizes_asked_for() -> None:
    rows = make_rows(50, 100, sizes=RowSizes((700, 702), (20, 21)))
    assert {len(prompt) for prompt in rows.non_tensor_batch["prompt_ids"]} == {700, 701, 702}
    assert set(rows.batch["response_mask"].sum(-1).tolist()) == {20, 21}
    lengths = true_lengths(rows)
    assert rows_within(lengths, sum(lengths[:7])) == 7
    assert rows_within(lengths, sum(lengths[:7]) - 1) == 6
    assert rows_within(lengths, 1) == 1
    with pytest.raises(ValueError, match="--response-tokens"):
        RowSizes(response=(1, 100000))


def test_the_small_shape_is_the_size_of_its_name() -> None:
    config = shape_config("smollm2-135m")
    assert config.hidden_size == config.num_attention_heads * 64
    kv = config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    layer = config.hidden_size * (2 * config.hidden_size + 2 * kv + 3 * config.intermediate_size + 2)
    total = config.num_hidden_layers * layer + config.hidden_size * (config.vocab_size + 1)
    assert total == 134_515_008


@pytest.mark.recipes  # every arm of the benchmark, compiled ones too
def test_each_way_runs_once_for_each_token_budget(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "benchmarks.update_phase", "--shape", "tiny", "--device", "cpu", "--arms", "plain", "fit",
        "--rows", "4", "--steps", "1", "--prompt-tokens", "50", "60", "--response-tokens", "5", "9",
        "--micro-tokens", "70", "300", "--profile", str(tmp_path), "--out", str(tmp_path / "made" / "out.json"),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2])
    rows = json.loads((tmp_path / "made" / "out.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["arm"], row.get("micro_tokens")) for row in rows] == [("plain", None), ("fit", 70), ("fit", 300)]
    names = {path.stem for path in tmp_path.glob("*.txt")}
    both = {f"fit-{budget}-{call}" for budget in (70, 300) for call in ("update", "log_prob")}
    assert names == {"plain-update"} | both
    hooks = [row["profile"]["update"]["fsdp_hooks"] for row in rows[1:]]
    assert hooks[0] > hooks[1] > 0  # three micro-batches against one


@pytest.mark.parametrize("option", ["--rows", "--steps", "--mini-rows", "--micro-rows", "--micro-tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_counts_below_one_are_refused(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["update_phase", option, value])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert f"argument {option}: {value} has to be a whole number, at least 1" in capsys.readouterr().err
