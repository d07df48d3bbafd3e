"""What Ray is started with: the machine's resources for a Ray of our own, nothing for a cluster that runs already."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from verl.trainer import main_ppo
from verl.trainer.config import ConfigError
from verl.utils.lost_actors import unusable_ray_folder

IDLE_WORKERS = "RAY_prestart_worker_first_driver"


@pytest.fixture()
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments ``ray.init`` was called with."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: arguments.update(given))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    for name in main_ppo.RAY_SETTINGS:
        monkeypatch.setenv(name, "unset")  # so that it is put back after the test
        monkeypatch.delenv(name)
    return arguments


def _config(device: str) -> Any:
    return SimpleNamespace(ray_init=SimpleNamespace(num_cpus=6), trainer=SimpleNamespace(device=device))


def test_a_local_ray_is_told_its_cpus_and_gpus(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_ppo, "visible_gpus", lambda: 2)
    main_ppo.start_ray(_config("cuda"))
    assert (started["address"], started["num_cpus"], started["num_gpus"]) == ("local", 6, 2)


def test_a_local_ray_is_not_started_on_a_full_disk(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_bavail=100, f_frsize=4096, f_files=1000, f_favail=1000)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    with pytest.raises(ConfigError, match=r"Ray's folder /.* is full \(0\.4 MiB left\); make room there, or set RAY_TMPDIR"):
        main_ppo.start_ray(_config("cpu"))
    assert not started
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    main_ppo.start_ray(_config("cpu"))  # where a cluster has its folder is not known before it is joined
    assert started


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("scratch/ray", "is not an absolute path"),
        ("~/ray", "is not an absolute path"),
        ("{file}", "holds no folder of Ray's: {file} is a file"),
        ("/tmp/" + 60 * "x", r"is \d+ bytes too long for the paths of Ray's sockets"),
    ],
)
@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_that_ray_cannot_use_is_named_by_its_variable(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str, given: str, why: str
) -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        given, why = given.format(file=file.name), why.format(file=file.name)
        monkeypatch.delenv("RAY_TMPDIR")
        monkeypatch.setenv(variable, given)
        with pytest.raises(ConfigError, match=f"^{variable}={given} {why}; set RAY_TMPDIR to a folder"):
            main_ppo.start_ray(_config("cpu"))
    assert not started


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_that_is_set_to_nothing_is_not_set(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv(variable, "")
    main_ppo.start_ray(_config("cpu"))
    assert started and variable not in os.environ


def test_the_length_of_its_folder_is_what_ray_itself_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.utils import validate_socket_filepath

    for length in range(1, 60):
        monkeypatch.setenv("RAY_TMPDIR", "/" + length * "x")
        session = f"/{length * 'x'}/ray/session_2026-01-02_03-04-05_678901_{os.getpid()}"
        try:
            validate_socket_filepath(f"{session}/sockets/plasma_store")
            fits = True
        except OSError:
            fits = False
        assert fits == ("too long" not in str(unusable_ray_folder()))


def test_a_local_ray_on_the_cpu_claims_no_gpu(started: dict[str, Any]) -> None:
    main_ppo.start_ray(_config("cpu"))
    assert started["num_cpus"] == 6 and "num_gpus" not in started


def test_a_running_cluster_is_joined_without_resources(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    main_ppo.start_ray(_config("cuda"))
    assert not {"address", "num_cpus", "num_gpus"} & set(started)
    assert not set(main_ppo.RAY_SETTINGS) & set(os.environ)


def test_a_local_ray_starts_no_idle_processes_unless_told_to_and_finds_its_store_as_long_as_ever(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    main_ppo.start_ray(_config("cpu"))
    assert os.environ[IDLE_WORKERS] == "0"
    pause, attempts = "RAY_raylet_client_connect_timeout_milliseconds", "RAY_raylet_client_num_connect_attempts"
    assert int(os.environ[pause]) * int(os.environ[attempts]) == 1000 * 10  # Ray's own product
    monkeypatch.setenv(IDLE_WORKERS, "1")
    main_ppo.start_ray(_config("cpu"))
    assert os.environ[IDLE_WORKERS] == "1"
