"""Paths that users give, as paths that every process of this machine can open.

Three kinds are understood: a path on disk, ``pkg://package.module/relative/path`` for a file or folder that ships
inside an installed package, and a name on the Hugging Face hub (``organisation/name``), which becomes the folder of its
cached snapshot. The hub is asked for nothing else, every request has a time limit, and ``HF_HUB_OFFLINE=1`` keeps to
what is cached. HDFS is not supported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = [
    "copy_to_local",
    "copy_to_shm",
    "hub_snapshot",
    "is_non_local",
    "local_mkdir_safe",
    "open_to_readers",
    "resolve_package_path",
    "write_atomically",
]

logger = logging.getLogger(__name__)

PACKAGE_SCHEME = "pkg://"
_HDFS_SCHEME = "hdfs://"
_SHM_ROOT = Path("/dev/shm")
_SHM_CACHE = "verl-cache"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOCK_SECONDS = 1800
_HUB_ANSWER_SECONDS = 10
_OTHER_FRAMEWORKS = ("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.tflite", "*.gguf", "*.ot", "original/*", "onnx/*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def is_non_local(path: str) -> bool:
    """Whether the path is on HDFS."""
    return str(path).startswith(_HDFS_SCHEME)


def copy_to_local(
    src: str | Path,
    cache_dir: str | Path | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
    key: str = "path",
    hub: bool = True,
) -> str:
    """A path that this machine can open.

    Args:
        src: path on disk, ``pkg://…``, or hub name; a path that exists goes before a hub name.
        cache_dir: where copies in shared memory go; ``/dev/shm/verl-cache`` by default.
        filelock: name of the lock file beside a copy.
        verbose: log where the path leads.
        always_recopy: copy into shared memory again even if a copy is there.
        use_shm: copy into shared memory, from where every process of the machine loads quickly.
        key: the config key that holds ``src``, for error messages.
        hub: whether ``src`` may be a hub name.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: a path of a kind that is not supported, or a hub name whose files cannot be had.
    """
    text = str(src)
    if is_non_local(text):
        raise ValueError(f"{key}={text}: HDFS is not supported; copy the files to a local disk and give that path")
    if text.startswith(PACKAGE_SCHEME):
        path = resolve_package_path(text, key=key)
    else:
        path = os.path.abspath(os.path.expanduser(text))
        if not os.path.exists(path):
            if not hub or not _HUB_NAME.fullmatch(text):
                raise FileNotFoundError(f"{key}={text}: there is nothing at {path}; give an existing path")
            path = hub_snapshot(text, key=key)
    if use_shm:
        path = copy_to_shm(path, cache_dir=cache_dir, filelock=filelock, always_recopy=always_recopy)
    if verbose:
        logger.info("%s=%s is read from %s", key, text, path)
    return path


def hub_snapshot(name: str, key: str = "path") -> str:
    """The folder of the cached snapshot of ``organisation/name``, downloaded first where it is not complete.

    Processes of a machine that ask for the same name wait for the one that downloads. Where the hub does not answer, a
    snapshot that is cached in full is taken.

    Raises:
        ValueError: the files are neither cached nor to be had from the hub.
    """
    import huggingface_hub
    from huggingface_hub import constants

    remedy = (
        f"Give a local model folder as {key}, or download the model on a machine with network access "
        f"(hf download {name}) and set HF_HOME to the cache that holds it"
    )
    tried = "the cache alone (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    lock = Path(tempfile.gettempdir()) / f"verl-hub-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
    try:
        with FileLock(lock, timeout=_LOCK_SECONDS):
            folder = huggingface_hub.snapshot_download(
                name,
                etag_timeout=_HUB_ANSWER_SECONDS,
                local_files_only=constants.HF_HUB_OFFLINE,
                ignore_patterns=list(_OTHER_FRAMEWORKS),
            )
    except Timeout as error:
        raise ValueError(
            f"{key}={name}: waited {_LOCK_SECONDS} s for another process to download it ({lock}). {remedy}"
        ) from error
    except Exception as error:  # the hub's client raises errors of its own and of several network libraries
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{key}={name}: there is no such folder here, and the hub's files could not be had from {tried} or from "
            f"the cache {constants.HF_HUB_CACHE}: {cause}. {remedy}"
        ) from error
    if (Path(folder) / "config.json").is_file() and not any(any(Path(folder).glob(kind)) for kind in _WEIGHTS):
        raise ValueError(f"{key}={name}: the cached snapshot {folder} is incomplete, it has no weight files. {remedy}")
    return str(folder)


def resolve_package_path(uri: str, key: str = "path") -> str:
    """The path on disk of ``pkg://package.module/relative/path``."""
    package, _, relative = uri.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package:
        raise ValueError(f"{key}={uri}: expected {PACKAGE_SCHEME}package.module/relative/path")
    try:
        root = importlib.resources.files(package)
    except (ModuleNotFoundError, TypeError) as error:
        raise ValueError(f"{key}={uri}: there is no package {package!r} here; install it or give a path") from error
    resource = root.joinpath(*relative.split("/")) if relative else root
    # A namespace package has several roots behind one object, which finds the right one when a child is asked for.
    path = Path(str(resource))
    if not path.exists():
        raise FileNotFoundError(f"{key}={uri}: the package {package!r} has no {relative!r} on disk ({path})")
    return str(path.resolve())


def copy_to_shm(
    src: str | Path,
    cache_dir: str | Path | None = None,
    filelock: str = ".file.lock",
    always_recopy: bool = False,
) -> str:
    """Copy a file or folder into shared memory, once for all processes of the machine; returns the copy's path.

    A copy whose files have other names, sizes or times than the source is replaced. When shared memory is too small,
    a warning says so and the source is used.
    """
    source = Path(src).absolute()
    root = Path(cache_dir) if cache_dir is not None else _SHM_ROOT / _SHM_CACHE
    folder = root / hashlib.sha256(str(source).encode()).hexdigest()[:32]
    target = folder / source.name
    local_mkdir_safe(folder)
    with FileLock(folder / filelock, timeout=_LOCK_SECONDS):
        if target.exists() and not always_recopy and _listing(target) == _listing(source):
            return str(target)
        _remove(target)
        needed = sum(size for _, size, _ in _listing(source)) / 2**30
        free = shutil.disk_usage(folder).free / 2**30
        if needed > free:
            logger.warning("use_shm: %s needs %.1f GiB but %s has %.1f GiB free", source, needed, root, free)
            return str(source)
        staging = Path(tempfile.mkdtemp(dir=folder))
        try:
            if source.is_dir():
                shutil.copytree(source, staging / source.name)
            else:
                shutil.copy2(source, staging / source.name)
            os.replace(staging / source.name, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return str(target)


def local_mkdir_safe(path: str | Path) -> str:
    """Make a folder with its parents; it is fine when another process does so at the same time."""
    path = os.path.abspath(path)
    os.makedirs(path, exist_ok=True)
    return path


def open_to_readers(folder: Path, pattern: str = "*.safetensors") -> None:
    """Give files in ``folder`` the mode that others written there have (umask, access lists).

    safetensors makes its files readable for their owner alone.
    """
    fresh = folder / f".mode-{os.getpid()}"
    fresh.touch(exist_ok=False)
    try:
        mode = fresh.stat().st_mode & 0o777
    finally:
        fresh.unlink()
    for file in folder.glob(pattern):
        if file.is_file():
            file.chmod(mode)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all; on a disk that is full the old one stays."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _listing(path: Path) -> list[tuple[str, int, int]]:
    """Relative name, size and modification time (ns) of every file."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
