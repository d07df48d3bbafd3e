"""Tracking: the console line, TensorBoard, wandb offline and resumed, missing packages, generations."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path

import pytest

from verl.trainer.config import default_config
from verl.utils.logger.aggregate_logger import LocalLogger, concat_dict_to_str
from verl.utils.logger.wandb_backend import WandbLogger, has_credentials
from verl.utils.tracking import Tracking, ValidationGenerationsLogger, import_packages


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch, tmp_path_factory) -> None:
    """No key of the machine's user, no wandb folder outside the test's."""
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "NETRC", "TENSORBOARD_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def test_the_console_line(capsys) -> None:
    assert concat_dict_to_str({"a/b": 1.23456, "n": 2, "text": "no"}, 7) == "step:7 - a/b:1.235 - n:2.000"
    leading = {"a/b": 1, "actor/lr": 0.5, "episode/success_rate": 0.25}
    assert concat_dict_to_str(leading, 7) == "step:7 - episode/success_rate:0.250 - actor/lr:0.500 - a/b:1.000"
    small = {"lr": 2e-4, "gap": -0.0034567, "none": 0.0, "edge": 0.01, "bad": float("nan"), "large": 12345.6}
    assert concat_dict_to_str(small, 1).split(" - ")[1:] == [
        "lr:0.0002", "gap:-0.00346", "none:0.000", "edge:0.010", "bad:nan", "large:12345.600"
    ]  # fmt: skip
    LocalLogger().log({"x": 1}, step=1)
    LocalLogger(print_to_console=False).log({"x": 2}, step=2)
    assert capsys.readouterr().out == "step:1 - x:1.000\n"


def test_all_trackers_and_the_file_get_each_step(tmp_path: Path, capsys) -> None:
    tracking = Tracking("p", "e", ["console", "tensorboard"], {"k": 1}, run_dir=tmp_path)
    tracking.log({"loss": 0.25}, step=1)
    tracking.log(data={"loss": 0.125}, step=2)
    tracking.log({"only": 1.0}, step=2, backend="console")
    tracking.finish()
    tracking.finish()
    assert capsys.readouterr().out.splitlines() == ["step:1 - loss:0.250", "step:2 - loss:0.125", "step:2 - only:1.000"]
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert found == [{"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.125}]
    assert tensorboard_values(tmp_path / "tensorboard", "loss") == [(1, 0.25), (2, 0.125)]


def tensorboard_values(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_tensorboard_forgets_steps_that_are_done_again(tmp_path: Path) -> None:
    first = Tracking("p", "e", "tensorboard", run_dir=tmp_path)
    for step in (1, 2, 3):
        first.log({"loss": float(step)}, step)
    first.finish()
    again = Tracking("p", "e", "tensorboard", run_dir=tmp_path, resume_step=1)
    again.log({"loss": 20.0}, 2)
    again.finish()
    assert tensorboard_values(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 20.0)]


def test_unknown_and_missing_trackers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer.logger has 'wandbb'"):
        Tracking("p", "e", ["wandbb"])
    for name in ("mlflow", "swanlab", "clearml", "vemlp_wandb"):
        with pytest.raises(ValueError, match="is not installed: pip install"):
            Tracking("p", "e", [name])


def test_for_run_takes_everything_from_the_config(tmp_path: Path) -> None:
    config = default_config(f"trainer.run_dir={tmp_path}/run", "trainer.logger=console")
    tracking = Tracking.for_run(config, resume_step=0, state={})
    tracking.log({"a": 1}, 0)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert tracking.state_dict() == {}
    tracking.finish()


def test_wandb_without_a_key_records_offline_says_so_and_resumes(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        tracking = Tracking("p", "e", ["wandb"], {"k": {"x": 1}}, run_dir=tmp_path)
    notices = [record.message for record in caplog.records if "offline" in record.message]
    assert len(notices) == 1
    tracking.log({"loss": 0.5}, step=1)
    state = tracking.state_dict()
    tracking.finish()
    again = Tracking("p", "e", ["wandb"], {}, run_dir=tmp_path, resume_step=1, state=state)
    assert again.state_dict() == state and state["wandb_run_id"]
    again.log({"loss": 0.25}, step=2)
    again.finish()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    pattern = f"{tmp_path}/wandb/offline-run-*-{state['wandb_run_id']}*"
    # Two runs that start within one second get folders told apart by a suffix: the file inside names the run.
    assert notices[0].endswith(f"`wandb sync --id {state['wandb_run_id']} {pattern}`")
    assert runs == sorted(Path("/").glob(pattern[1:]))  # both
    assert len(runs) == 2 and all((run / f"run-{state['wandb_run_id']}.wandb").is_file() for run in runs)


class FakeWandb(types.ModuleType):
    """Stands in for a service that fails where it is told to."""

    def __init__(
        self, fail_modes: tuple[str, ...] = (), fail_log: bool = False, said: str = "no network\nmore"
    ) -> None:
        super().__init__("wandb")
        self.tried: list[str] = []
        self.logged: list[tuple[dict, int]] = []
        self._fail_modes, self._fail_log, self._said = fail_modes, fail_log, said
        self.id, self.dir = "abc", "/x/files"

    def Settings(self, **values) -> dict:
        return values

    def Table(self, columns, data) -> tuple:
        return (tuple(columns), data)

    def init(self, mode, **values) -> FakeWandb:
        self.tried.append(mode)
        if mode in self._fail_modes:
            raise RuntimeError(self._said)
        return self

    def log(self, data, step) -> None:
        if self._fail_log:
            raise OSError("gone")
        self.logged.append((data, step))

    def finish(self) -> None:
        self.logged.append(({}, -1))


def test_wandb_goes_online_with_a_key_and_falls_back_offline(monkeypatch, tmp_path: Path, caplog) -> None:
    fake = FakeWandb(fail_modes=("online",))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    logger = WandbLogger("p", "e", {}, str(tmp_path), None)
    assert fake.tried == ["online", "offline"] and logger.run_id == "abc"
    assert "did not start in mode online: no network" in caplog.text


def test_a_failing_tracker_never_stops_the_run(monkeypatch, tmp_path: Path, caplog) -> None:
    silent = FakeWandb(fail_modes=("offline",), said="")
    monkeypatch.setitem(sys.modules, "wandb", silent)
    assert WandbLogger("p", "e", {}, str(tmp_path), None).run_id is None
    assert silent.tried == ["offline"] and "did not start in mode offline: RuntimeError" in caplog.text
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail_log=True))
    logger = WandbLogger("p", "e", {}, str(tmp_path), None)
    logger.log({"a": 1}, 1)
    logger.log({"a": 1}, 2)
    logger.finish()
    assert caplog.text.count("gets no more metrics") == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert WandbLogger("p", "e", {}, str(tmp_path), None).run_id is None


def test_credentials_come_from_the_environment_or_netrc(tmp_path: Path) -> None:
    assert not has_credentials({"HOME": str(tmp_path)})
    assert has_credentials({"WANDB_API_KEY": "x"})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n", encoding="utf-8")
    assert has_credentials({"NETRC": str(tmp_path / "netrc")})
    assert not has_credentials({"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "https://wandb.example.org"})


def test_generations_go_to_a_table_and_a_file(monkeypatch, tmp_path: Path) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracking = Tracking("p", "e", "wandb", run_dir=tmp_path)
    tracking.log_generations([types.SimpleNamespace(prompt="q", response="r", score=1)], step=5)
    tracking.log_generations([("q2", "r2", 0.0)], step=10)
    tracking.log_generations([], step=15)
    written = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == [{"step": 5, "input": "q", "output": "r", "score": 1.0},
                       {"step": 10, "input": "q2", "output": "r2", "score": 0.0}]
    tables = [data["val/generations"] for data, _ in fake.logged]
    assert tables[-1] == (("step", "input", "output", "score"), [[5, "q", "r", 1.0], [10, "q2", "r2", 0.0]])
    ValidationGenerationsLogger().log({}, [("a", "b", 1)], 0)


def test_the_other_trackers_get_numbers_under_names_they_take(monkeypatch, tmp_path: Path) -> None:
    calls: list[tuple] = []
    mlflow = types.ModuleType("mlflow")
    mlflow.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    mlflow.set_experiment = lambda name: calls.append(("experiment", name))
    mlflow.start_run = lambda run_name: calls.append(("run", run_name))
    mlflow.log_params = lambda values: calls.append(("params", values))
    mlflow.log_metrics = lambda values, step: calls.append(("metrics", values, step))
    mlflow.end_run = lambda: calls.append(("end",))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracking = Tracking("p", "e", "mlflow", {"a": {"b": 1}, "c": {}})
    tracking.log({"val/pass@4": 0.5, "text": "x"}, 3)
    tracking.finish()
    assert calls == [("experiment", "p"), ("run", "e"), ("params", {"a.b": 1, "c": {}}),
                     ("metrics", {"val/pass_at_4": 0.5}, 3), ("end",)]


@pytest.mark.parametrize("backends", ["swanlab", ["console", "clearml", "swanlab"]])
def test_packages_are_imported_ahead_where_they_can_be(backends, monkeypatch, tmp_path) -> None:
    (tmp_path / "swanlab.py").write_text("imported = True\n")
    (tmp_path / "clearml.py").write_text("import no_such_package_of_clearml\n")
    (tmp_path / "console.py").write_text("raise AssertionError('a tracker without a package')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    import_packages(backends)
    assert sys.modules.pop("swanlab").imported
    assert "clearml" not in sys.modules
