"""A configuration as YAML, so that Hydra reads the same values from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes text that Hydra's YAML takes for a number and PyYAML does not, such as ``1e5`` or a digest like it."""


_POWER_OF_TEN = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _POWER_OF_TEN, [*"-+0123456789"])


def yaml_text(tree: Mapping[str, Any]) -> str:
    """``tree`` as YAML, in the order of its keys; nodes of leaves alone take one line."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
