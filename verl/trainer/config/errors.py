"""The error of a configuration that cannot run, and the search for the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_SHORT_FOR = "actor_rollout_ref"  # what the documentation leaves out: actor.optim.lr
_MOST_SHOWN = 4
_MOST_BESIDE = 8


class ConfigError(ValueError):
    """Settings the user can change to make the run possible; the message names the keys and what would fit.

    Attributes:
        problems: one line for each setting that does not work; the message is made of them.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(several(problems))
        self.problems = problems


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None where none is near.

    Dotted keys are compared in full and by their last part, so that a key put under the wrong node is found too.

    Args:
        word: what was typed, such as ``data.trian_batch_size``.
        candidates: the names there are.
    """
    best, best_score = None, 0.6
    leaf = word.rsplit(".", 1)[-1]
    for candidate in candidates:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rsplit(".", 1)[-1]).ratio()
        score = 0.5 * whole + 0.5 * last
        if score > best_score:
            best, best_score = candidate, score
    return best


def meant_keys(key: str, candidates: Iterable[str]) -> list[str]:
    """Keys that ``key`` may have been meant for, none to several.

    The short names of the documentation come first (``actor.optim.lr``), then the ends of names (``optim.lr`` of actor
    and critic), and last what is most like it.
    """
    names = sorted(candidates)
    whole = f"{_SHORT_FOR}.{key}"
    if whole in names:
        return [whole]
    if endings := [name for name in names if name.endswith(f".{key}")]:
        return endings
    first = key.partition(".")[0]
    is_short = f"{_SHORT_FOR}.{first}" in names and first not in names
    meant = nearest(whole if is_short and first != key else key, names)
    return [meant] if meant else []


def _one_of(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_SHOWN])
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more of that name")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _beside(key: str, names: Sequence[str]) -> str | None:
    """The keys of the section that ``key`` was looked for in, those most like it first; None where there is no such."""
    section, _, leaf = key.rpartition(".")
    if not section:
        return None
    if f"{_SHORT_FOR}.{section}" in names and section not in names:
        section = f"{_SHORT_FOR}.{section}"
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    if not beside:
        return _beside(section, names)
    beside.sort(key=lambda name: -difflib.SequenceMatcher(None, leaf, name).ratio())
    more = f" and {len(beside) - _MOST_BESIDE} more" if len(beside) > _MOST_BESIDE else ""
    return f"{section} has {', '.join(beside[:_MOST_BESIDE])}{more}."


def unknown_key_message(key: str, candidates: Iterable[str]) -> str:
    """One line for a key that is not in the configuration."""
    if key.isupper():
        return f"There is no setting {key}; an environment variable stands before the command: {key}=... bash ..."
    names = sorted(candidates)
    if meant := meant_keys(key, names):
        hint = f"did you mean {_one_of(meant)}?"
    else:
        hint = _beside(key, names) or "see verl/trainer/config/ppo_trainer.yaml for the keys there are."
    return f"There is no setting {key}; {hint} (A key of your own is added with a plus: +{key}=...)"


def several(problems: Sequence[str]) -> str:
    """One problem as it is, several as a list with their number."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} settings do not work:", *problems])
