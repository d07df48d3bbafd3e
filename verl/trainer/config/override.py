"""One override of the command line, read by Hydra's grammar, with text kept as it was typed.

Hydra's grammar lacks characters that paths have, such as ``~``, ``=`` and letters with accents, and it makes a number
of what reads like one. A value without any of its syntax is plain text, and is handed to it in quotes.
"""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl.trainer.config.errors import ConfigError

_REFERENCE = re.compile(r"\$\{[\w.]+\}")
_SYNTAX = re.compile(r"[\[\]{}(),'\"\\]")
_FOREIGN = re.compile(r"[^a-zA-Z0-9_\s/\-+.$%*@?|:,\[\]{}()'\"\\]")  # in no value without quotes


def read_override(text: str) -> Override:
    """``key=value`` as Hydra reads it; a value that is plain text may have any characters.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return _read(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        if value.strip() and not value.startswith("=") and not _SYNTAX.search(_REFERENCE.sub("", value)):
            try:
                return _read(f"{key}='{value}'")
            except HydraException:  # then it is the key
                pass
        raise ConfigError(_why_unreadable(text, str(error).splitlines()[0])) from error


def _read(text: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def _why_unreadable(text: str, reason: str) -> str:
    key, given, value = text.partition("=")
    if given and (foreign := _FOREIGN.search(_REFERENCE.sub("", value))):
        home = ", or write $HOME for ~" if foreign.group() == "~" else ""
        return (
            f"Cannot read {text!r}: {foreign.group()!r} can stand there only in quotes that are part of the value; "
            f"""write '{key}="text"', or '{key}=["text","text"]' for a list{home}"""
        )
    reason = re.sub(r"^\w+(Exception|Error): ", "", reason)
    return f"Cannot read {text!r} as an override: write key=value, such as trainer.total_epochs=2 ({reason})"


def as_typed(override: Override) -> Override:
    """The override with numbers as the text that was typed: ``1e5`` and ``007`` are names, not 100000.0 and 7.

    Values listed for several jobs (``--multirun``) are looked at one by one; other lists and mappings stay as they are.
    """
    key, _, value = str(override.input_line).partition("=")
    parts = value.split(",") if override.is_choice_sweep() else [value]
    if not any(_is_number(part) for part in parts):
        return override
    quoted = ",".join(f"'{part.strip()}'" if _is_number(part) else part for part in parts)
    return read_override(f"{key}={quoted}")


def _is_number(text: str) -> bool:
    try:
        value = _read(f"key={text}").value()
    except HydraException:
        return False
    return isinstance(value, (int, float)) and not isinstance(value, bool)
