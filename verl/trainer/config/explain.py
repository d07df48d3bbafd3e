"""``explain=true``."""

from __future__ import annotations

from verl.trainer.config.compose import Composition


def explain(composition: Composition) -> str:
    """The configuration with sources."""
    return ""
