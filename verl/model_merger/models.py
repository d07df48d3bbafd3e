"""The transformers models that merging builds, writes and reads back."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)

_AUTO_CLASSES = {
    "ForCausalLM": AutoModelForCausalLM,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}
_COPIED = (".json", ".txt", ".jinja", ".model", ".py")
_NOT_COPIED = ("config.json", "generation_config.json", "checkpoint.json")
_SHARD_SIZE = "5GB"
_SAMPLE = "I'd like 2 Red T-shirts (size XL), price lower than 40.50 dollars\n\n  click[Buy Now] Größe 全 w5 w7"


@dataclass(frozen=True)
class ModelDescription:
    """What a folder says of its model: the config and which of transformers' classes it is for."""

    folder: Path
    config: PretrainedConfig
    auto_class: type
    trust_remote_code: bool = False

    @property
    def is_value_model(self) -> bool:
        return self.auto_class is not AutoModelForCausalLM


def describe_model(
    folder: Path, is_value_model: bool | None = None, trust_remote_code: bool = False
) -> ModelDescription:
    """The description in ``folder``.

    Args:
        is_value_model: True = one number per position, whatever the config says; None = what the config says.

    Raises:
        ValueError: there is no ``config.json``, or it cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, without which the model cannot be built")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be used: {str(error).splitlines()[0]}") from error
    named = (config.architectures or ["ForCausalLM"])[0]
    auto_class = next((kind for end, kind in _AUTO_CLASSES.items() if named.endswith(end)), AutoModelForCausalLM)
    if is_value_model and auto_class is AutoModelForCausalLM:
        auto_class, config.num_labels = AutoModelForTokenClassification, 1
    return ModelDescription(folder, config, auto_class, trust_remote_code)


def build_model(
    description: ModelDescription, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> nn.Module:
    """The model with the tensors of ``state`` as its weights (not copied).

    Raises:
        ValueError: tensors are missing, left over, or of another shape than the config says.
    """
    with init_empty_weights(include_buffers=False):
        model = description.auto_class.from_config(
            description.config, dtype=dtype, trust_remote_code=description.trust_remote_code
        )
    model.tie_weights()
    expected = model.state_dict()
    needed = {name for name, _ in model.named_parameters()}
    problems = [
        (sorted(needed - state.keys()), "are missing in the checkpoint"),
        (sorted(state.keys() - expected.keys()), "are in the checkpoint but not in the model of config.json"),
        (
            sorted(name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape),
            "have another shape than config.json says",
        ),
    ]
    for names, what in problems:
        if names:
            raise ValueError(f"{len(names)} tensors {what}, such as {', '.join(names[:3])} ({description.folder})")
    broken = sorted(name for name, tensor in state.items() if not torch.isfinite(tensor).all())
    if broken:
        raise ValueError(f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}; take an earlier checkpoint")
    _check_tied(model, state)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if description.auto_class is AutoModelForCausalLM and (description.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(description.folder)
    model.config.use_cache = True
    return model.requires_grad_(False).eval()


def _check_tied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Tensors that the config ties are equal where the checkpoint has both."""
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first_name.setdefault(id(parameter), name)
        if other != name and name in state and other in state and not torch.equal(state[name], state[other]):
            raise ValueError(
                f"config.json ties {name} to {other} (tie_word_embeddings), but the checkpoint has two different "
                "tensors; leave out --tie-word-embedding, or correct config.json"
            )


def write_model(model: nn.Module, description: ModelDescription, folder: Path) -> None:
    """Weights as safetensors, configs, and what the checkpoint has beside them (tokenizer, chat template, code)."""
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    copy_tokenizer(description.folder, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the small files beside a model: tokenizer, chat template, code of its own."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED and file.name not in _NOT_COPIED and not file.name.endswith(".index.json")
        if file.is_file() and wanted and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)


def load_model(folder: Path, description: ModelDescription, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a Hugging Face folder.

    Raises:
        ValueError: it cannot be loaded, or transformers had to make up or drop tensors.
    """
    try:
        model, report = description.auto_class.from_pretrained(
            folder,
            dtype=dtype or "auto",
            trust_remote_code=description.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, safetensors and torch each raise their own
        raise ValueError(f"{folder} cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            raise ValueError(f"{folder}: loading it gives {what}: {sorted(map(str, report[what]))[:3]}")
    return model.requires_grad_(False).eval()


@torch.no_grad()
def check_forward(model: nn.Module, folder: Path) -> None:
    """The model answers a few tokens with finite numbers.

    Raises:
        ValueError: it does not.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(min(8, vocabulary))[None]
    if not torch.isfinite(model(input_ids=ids).logits).all():
        raise ValueError(f"the model in {folder} answers with NaN or infinity")


def check_tokenizer(folder: Path, trust_remote_code: bool) -> bool:
    """Whether the folder has a tokenizer; one that it has must load. A warning says where transformers misreads it.

    Raises:
        ValueError: it does not load.
    """
    if not any(folder.glob("tokenizer*")):
        logger.warning("%s has no tokenizer: copy that of the base model beside it", folder)
        return False
    try:
        tokenizer = hf_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"the tokenizer in {folder} does not load: {error}") from error
    if _is_misread(folder, tokenizer, trust_remote_code):
        logger.warning(
            "transformers.AutoTokenizer gives other tokens for this folder than the model was trained with: for this "
            "model type it replaces parts of tokenizer.json. Load it with transformers.PreTrainedTokenizerFast, or "
            "copy the tokenizer's files to a folder without config.json (vLLM: --tokenizer FOLDER)"
        )
    return True


def _is_misread(folder: Path, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> bool:
    """Whether ``AutoTokenizer`` reads ``_SAMPLE`` otherwise without saying so."""
    try:
        usual = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # whoever tries it hears of it
    return usual(_SAMPLE)["input_ids"] != tokenizer(_SAMPLE)["input_ids"]
