"""Where paths lead."""

import os
from types import SimpleNamespace

import pytest

import verl
from verl.utils import fs


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.bin").write_bytes(b"12345")
    return folder


def test_local_paths_stay(model, monkeypatch):
    assert fs.copy_to_local(str(model)) == str(model)
    monkeypatch.chdir(model.parent)
    assert fs.copy_to_local("model/config.json") == str(model / "config.json")
    monkeypatch.setenv("HOME", str(model.parent))
    assert fs.copy_to_local("~/model") == str(model)


def test_package_paths():
    path = fs.copy_to_local("pkg://verl/version/version")
    with open(path) as file:
        assert file.read().strip() == verl.__version__
    assert os.path.isdir(fs.copy_to_local("pkg://verl.utils"))
    with pytest.raises(FileNotFoundError, match="a.b=pkg://verl/nothing.here"):
        fs.copy_to_local("pkg://verl/nothing.here", key="a.b")
    with pytest.raises(ValueError, match="no package 'not_a_package'"):
        fs.copy_to_local("pkg://not_a_package/x")
    with pytest.raises(ValueError, match="expected pkg://"):
        fs.copy_to_local("pkg:///x")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one whole model; ``asked`` holds the arguments of every call."""
    from huggingface_hub import constants

    asked, folder = [], tmp_path / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")

    def download(name, **arguments):
        asked.append({"name": name, **arguments})
        if name == "no/such":
            raise OSError("cannot reach the hub\nsecond line")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return SimpleNamespace(asked=asked, folder=folder, constants=constants)


def test_a_hub_name_becomes_the_cached_snapshot(hub, model, monkeypatch):
    assert fs.copy_to_local("Qwen/Qwen2.5-1.5B-Instruct") == str(hub.folder)
    assert fs.copy_to_local("gpt2") == str(hub.folder)
    assert [call["name"] for call in hub.asked] == ["Qwen/Qwen2.5-1.5B-Instruct", "gpt2"]
    assert all(0 < call["etag_timeout"] <= 60 and call["local_files_only"] is False for call in hub.asked)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    fs.copy_to_local("gpt2")
    assert hub.asked[-1]["local_files_only"] is True
    monkeypatch.chdir(model.parent)
    assert fs.copy_to_local("model/sub") == str(model / "sub") and len(hub.asked) == 3  # a folder goes before the hub


def test_a_hub_name_that_cannot_be_had_says_what_to_do(hub, monkeypatch):
    key = "actor_rollout_ref.model.path"
    with pytest.raises(ValueError, match=rf"{key}=no/such: .*huggingface.*: cannot reach the hub\. Give a local .*{key}"):
        fs.copy_to_local("no/such", key=key)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        fs.copy_to_local("no/such", key=key)
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{key}=org/half: .* is incomplete, it has no weight files"):
        fs.copy_to_local("org/half", key=key)
    with pytest.raises(FileNotFoundError, match="data/train.parquet"):
        fs.copy_to_local("data/train.parquet", hub=False)
    assert hub.asked[-1]["name"] == "org/half"


def test_missing_paths_name_the_key():
    for missing in ("/no/such/model", "./no-such-model", "~/no/such", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"actor_rollout_ref\.model\.path="):
            fs.copy_to_local(missing, key="actor_rollout_ref.model.path")
    assert fs.is_non_local("hdfs://x") and not fs.is_non_local("/x")
    with pytest.raises(ValueError, match="HDFS"):
        fs.copy_to_local("hdfs://namenode/x")


def test_shared_memory_copy_is_made_once_and_renewed(model, tmp_path):
    cache = tmp_path / "shm"
    first = fs.copy_to_local(str(model), use_shm=True, cache_dir=cache)
    assert first != str(model) and os.path.basename(first) == "model"
    with open(os.path.join(first, "sub", "weights.bin"), "rb") as file:
        assert file.read() == b"12345"
    weights = os.path.join(first, "sub", "weights.bin")
    times = os.stat(weights)
    with open(weights, "wb") as file:
        file.write(b"54321")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # looks like the source, so it is taken as it is

    def copied():
        with open(weights, "rb") as file:
            return file.read()

    assert fs.copy_to_local(str(model), use_shm=True, cache_dir=cache) == first and copied() == b"54321"
    fs.copy_to_local(str(model), use_shm=True, cache_dir=cache, always_recopy=True)
    assert copied() == b"12345"
    source = model / "sub" / "weights.bin"
    changed = source.stat().st_mtime_ns ^ 1  # another version of the same size, written within the same second
    source.write_bytes(b"67890")
    os.utime(source, ns=(changed, changed))
    fs.copy_to_local(str(model), use_shm=True, cache_dir=cache)
    assert copied() == b"67890"
    (model / "new.json").write_text("{}")
    fs.copy_to_local(str(model), use_shm=True, cache_dir=cache)
    assert os.path.exists(os.path.join(first, "new.json"))
    one_file = fs.copy_to_shm(model / "config.json", cache_dir=cache)
    assert os.path.basename(one_file) == "config.json" and os.path.getsize(one_file) == 2


def test_too_little_shared_memory_uses_the_source(model, tmp_path, monkeypatch, caplog):
    usage = type("Usage", (), {"free": 3})
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda path: usage)
    assert fs.copy_to_local(str(model), use_shm=True, cache_dir=tmp_path / "shm") == str(model)
    assert "use_shm" in caplog.text


def test_weights_get_the_mode_of_files_written_beside_them(tmp_path):
    weights, other = tmp_path / "model.safetensors", tmp_path / "notes.txt"
    for mask, expected in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        for file in (weights, other):
            file.touch()
            file.chmod(0o600)
        before = os.umask(mask)
        try:
            fs.open_to_readers(tmp_path)
        finally:
            os.umask(before)
        assert weights.stat().st_mode & 0o777 == expected and other.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
