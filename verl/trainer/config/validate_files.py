"""The rules of a configuration that look at the disk: model folder, parquet files, data folders."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.config.names import folder_name_problem
from verl.trainer.config.schema import PPOTrainerConfig
from verl.utils.checkpoint.step_folder import resume_path_problem

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_PREPARE = "python -m examples.data_preprocess.prepare --mode text"


def check_model(config: PPOTrainerConfig) -> Iterator[str]:
    """The folders of policy and critic, where the paths name some on this machine."""
    policy, critic = config.actor_rollout_ref.model.path, config.critic.model.path
    yield from check_model_path("actor_rollout_ref.model.path", policy)
    if config.uses_critic and critic != policy:
        yield from check_model_path("critic.model.path", critic)


def check_model_path(key: str, path: str | None) -> Iterator[str]:
    """A path that names no model in Hugging Face format; hub names and remote paths are left to the loader."""
    if not path:
        yield f"{key} is not set; use a model folder, a hub name such as Qwen/Qwen2.5-1.5B-Instruct, or preset=embedded"
        return
    folder = local_folder(path)
    if folder is None:
        return
    if not folder.is_dir():
        yield f"{key}={path}: there is no folder {folder}; check the path, or use a hub name"
    elif not (folder / "config.json").is_file():
        yield f"{key}={path}: the folder {folder} holds no config.json; use a folder in Hugging Face format"


def local_folder(path: str) -> Path | None:
    """The folder that a model path names on this machine; None for hub names and remote paths."""
    if path.startswith("pkg://"):
        return package_folder(path)
    if "://" in path:
        return None
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", "~", ".")) or not _HUB_NAME.fullmatch(path)
    return folder if looks_local or folder.is_dir() else None


def package_folder(path: str) -> Path:
    """``pkg://package.module/relative/path`` as a folder, found without importing the package."""
    dotted, _, relative = path.removeprefix("pkg://").partition("/")
    top, *rest = dotted.split(".")
    spec = importlib.util.find_spec(top)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    candidates = [Path(place, *rest, relative) for place in places]
    return next((one for one in candidates if one.exists()), candidates[0] if candidates else Path(dotted, relative))


def check_parquet(config: PPOTrainerConfig) -> Iterator[str]:
    """The parquet files are there, can be read and hold at least one batch."""
    data = config.data
    train_rows = yield from _count_rows("data.train_files", data.train_files, config.explain)
    yield from _count_rows("data.val_files", data.val_files, config.explain)
    batch = data.gen_batch_size or data.train_batch_size
    key = "data.gen_batch_size" if data.gen_batch_size else "data.train_batch_size"
    if train_rows is not None and train_rows < batch:
        yield (
            f"data.train_files holds {train_rows} rows, less than one batch of {key}={batch}; write more with "
            f"{_PREPARE} --train_data_size {batch}, or use {key}={max(train_rows, 1)}"
        )


def _count_rows(key: str, files: str | list[str], explained: bool) -> Iterator[str]:
    """Yields problems; returns the number of rows, or None where it is not known.

    ``explained``: the configuration is only shown, so that the files need not be there yet.
    """
    total: int | None = 0
    if not files:
        yield f"{key} names no file; write one with {_PREPARE}"
        return None
    for name in [files] if isinstance(files, str) else files:
        if "://" in name:
            total = None
            continue
        path = Path(name).expanduser()
        if not path.is_file():
            if not explained:  # recipes write the files when they start training, not when they explain
                yield f"{key}={name}: there is no such file; write it with {_PREPARE}"
            total = None
            continue
        try:
            rows = parquet_rows(path)
        except (OSError, ValueError) as error:
            yield f"{key}={name} is no readable parquet file ({str(error).splitlines()[0]}); write it with {_PREPARE}"
            total = None
            continue
        if rows == 0:
            yield f"{key}={name} holds no rows; write it with {_PREPARE}"
        total = None if total is None else total + rows
    return total


def parquet_rows(path: Path) -> int:
    """Rows that a parquet file says it has; OSError or ValueError where it cannot be read."""
    import pyarrow.parquet as pq  # 0.1 s, needed only here

    return int(pq.read_metadata(path).num_rows)


def check_code(config: PPOTrainerConfig) -> Iterator[str]:
    """Files and modules with code of the user's own."""
    policy = config.actor_rollout_ref.model.external_lib
    yield from check_external_lib("actor_rollout_ref.model.external_lib", policy)
    for key, source, used in (
        ("critic.model.external_lib", config.critic.model.external_lib, config.uses_critic),
        ("reward_model.model.external_lib", config.reward_model.model.external_lib, config.reward_model.enable),
    ):
        if used and source != policy:
            yield from check_external_lib(key, source)
    for node, path, name in (
        ("data.custom_cls", config.data.custom_cls.path, config.data.custom_cls.name),
        ("custom_reward_function", config.custom_reward_function.path, config.custom_reward_function.name),
    ):
        if not path:
            continue
        if not Path(path).expanduser().is_file():
            yield f"{node}.path={path}: there is no such file"
        if not name:
            yield f"{node}.name is not set: it says what to take from {path}"


def check_external_lib(key: str, source: str | list[str] | None) -> Iterator[str]:
    """Names of files (``.py``) or modules of which there is none; nothing is imported."""
    for name in [source] if isinstance(source, str) else source or []:
        if name.endswith(".py"):
            if not Path(name).expanduser().is_file():
                yield f"{key}={name}: there is no file {Path(name).expanduser().absolute()}"
        elif not _importable(name.partition(".")[0]):
            yield f"{key}={name}: there is no such module; give a file (ending in .py) or an importable module"


def _importable(package: str) -> bool:
    return bool(package) and (package in sys.modules or importlib.util.find_spec(package) is not None)


def check_tokenizers(config: PPOTrainerConfig) -> Iterator[str]:
    """Folders of tokenizers, where they are not those of a model that is checked already."""
    policy, critic = config.actor_rollout_ref.model.path, config.critic.model
    for key, path, used in (
        ("critic.model.tokenizer_path", critic.tokenizer_path, config.uses_critic and critic.path is not None),
        ("reward_model.model.input_tokenizer", config.reward_model.model.input_tokenizer, config.reward_model.enable),
    ):
        folder = local_folder(path) if used and path and path not in (policy, critic.path) else None
        if folder is not None and not folder.is_dir():
            yield f"{key}={path}: there is no folder {folder}; check the path, or use a hub name"


def check_paths(config: PPOTrainerConfig) -> Iterator[str]:
    """Other files and folders that a setting names."""
    webshop = config.env.webshop
    if "webshop" in config.env.env_name.lower():
        nouns = webshop.noun_source
        if nouns not in ("auto", "lexicon", "spacy") and not Path(nouns).expanduser().is_file():
            yield f"env.webshop.noun_source={nouns} has to be auto, lexicon, spacy or the path of a JSON file"
        if webshop.data_dir is not None and not Path(webshop.data_dir).expanduser().is_dir():
            yield (
                f"env.webshop.data_dir={webshop.data_dir}: there is no such folder; use the folder with the official "
                "files, or null for the embedded catalogue"
            )
    trainer = config.trainer
    for key, name in (
        ("trainer.project_name", trainer.project_name),
        ("trainer.experiment_name", trainer.experiment_name),
    ):
        if problem := folder_name_problem(key, name):
            yield problem
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        if problem := resume_path_problem(trainer.resume_from_path):
            yield problem
    for key, path in (
        ("trainer.run_dir", trainer.run_dir),
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("trainer.compile_cache_dir", trainer.compile_cache_dir),
        ("env.webshop.cache_dir", webshop.cache_dir),
    ):
        if path == "":
            yield f"{key} is empty; use a folder"
        elif path is None:
            continue
        elif Path(path).expanduser().is_file():
            yield f"{key}={path} is a file; use a folder"
