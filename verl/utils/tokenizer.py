"""Tokenizers and processors, ready for padding."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

__all__ = ["hf_processor", "hf_tokenizer", "set_pad_token_id"]


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Pad with the end-of-sequence token where a tokenizer has no padding token, in place."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has neither a padding nor an end-of-sequence token; give it one of them")
        tokenizer.pad_token_id = tokenizer.eos_token_id
        logger.info("no padding token: the end-of-sequence token %d pads", tokenizer.eos_token_id)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        correct_pad_token: see ``set_pad_token_id``.
        correct_gemma2: Gemma 2 ends a chat turn with ``<end_of_turn>`` (107), not with its end-of-sequence token.
        kwargs: for ``AutoTokenizer.from_pretrained``.
    """
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs.update(eos_token="<end_of_turn>", eos_token_id=107)
    loader = PreTrainedTokenizerFast if _is_generic(Path(name_or_path)) else AutoTokenizer
    tokenizer = loader.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether the folder says that its tokenizer.json is to be taken as it lies.

    ``AutoTokenizer`` does not listen for some model types (qwen2 among them): it puts that type's own text splitting in
    the file's place, and other tokens come out.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    declared = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
    return declared in ("PreTrainedTokenizerFast", "TokenizersBackend")


def hf_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """The multi-modal processor of a model, or None for a model that takes text only."""
    config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=bool(kwargs.get("trust_remote_code", False)))
    if not hasattr(config, "vision_config"):
        return None
    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    # A text-only model may still answer with its tokenizer.
    return processor if "Processor" in type(processor).__name__ else None
