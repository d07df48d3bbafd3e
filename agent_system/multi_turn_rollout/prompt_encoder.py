"""From an environment's text to prompt token ids: rendered once, tokenised once, and never too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

SHORTEN_HISTORY = "shorten_history"
_CUTS = ("left", "right", "middle")


class PromptEncoder:
    """Renders a text as a single user turn with the chat template and tokenises it.

    Args:
        tokenizer: with a chat template.
        max_length: most tokens of a prompt (``data.max_prompt_length``).
        truncation: what happens to a longer one (``data.truncation``): cut ``left``, ``right`` or in the ``middle``;
            ``error``; or ``shorten_history``: fewer past steps, then the end of the episode.
        template_kwargs: further arguments of the chat template.
        history_length: past steps a full prompt shows.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        truncation: str,
        template_kwargs: Mapping[str, Any],
        history_length: int,
    ) -> None:
        if truncation not in (*_CUTS, "error", SHORTEN_HISTORY):
            raise ValueError(
                f"data.truncation={truncation} is not one of left, right, middle, error, {SHORTEN_HISTORY}"
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncation = truncation
        self._template_kwargs = dict(template_kwargs)
        self._history_length = history_length
        self.shortened = 0
        """Prompts that were cut or lost history since the last reset of this counter."""

    def render(self, text: str) -> str:
        """The chat as the model reads it, up to where its answer begins."""
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False, **self._template_kwargs
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 and of true length, however long."""
        if not texts:
            return []
        rendered = [self.render(text) for text in texts]
        encoded = self._tokenizer(rendered, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def fit(self, ids: np.ndarray, shorter: Callable[[int], str | None]) -> np.ndarray | None:
        """Makes a prompt fit.

        Args:
            ids: token ids of the full prompt.
            shorter: the prompt text with at most so many past steps, None if it has no such form.

        Returns:
            At most ``max_length`` token ids, or None if the policy says that the episode ends here.

        Raises:
            ValueError: the prompt is too long and the policy is ``error``.
        """
        if len(ids) <= self._max_length:
            return ids
        self.shortened += 1
        if self._truncation == SHORTEN_HISTORY:
            return self._with_less_history(shorter)
        return truncate(ids, self._max_length, self._truncation)

    def _with_less_history(self, shorter: Callable[[int], str | None]) -> np.ndarray | None:
        for history_length in range(self._history_length - 1, -1, -1):
            text = shorter(history_length)
            if text is None:
                return None
            ids = self.encode([text])[0]
            if len(ids) <= self._max_length:
                return ids
        return None


def truncate(ids: np.ndarray, max_length: int, side: str) -> np.ndarray:
    """The last (``left``), the first (``right``) or the outer (``middle``) ``max_length`` ids.

    Raises:
        ValueError: ``side`` is ``error`` and there are more ids.
    """
    if len(ids) <= max_length:
        return ids
    if side == "left":
        return ids[-max_length:]
    if side == "right":
        return ids[:max_length]
    if side == "middle":
        head = max_length // 2
        return np.concatenate([ids[:head], ids[len(ids) - (max_length - head) :]])
    raise ValueError(
        f"a prompt has {len(ids)} tokens, data.max_prompt_length is {max_length}: raise it to at least {len(ids)}, or "
        f"set data.truncation={SHORTEN_HISTORY} (or left, right, middle) to go on with less"
    )
