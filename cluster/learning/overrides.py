"""What operators changed while the cluster ran, and the configuration -> the configuration that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.config import LearningConfig

PREFIX = "learning."
"""Of the names of such settings, in the registry too: `learning.gate.min_saving`."""


class BadSetting(ConfigError):
    """A value is outside its legal range. `field`: whose."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the registry's settings that are changes of the configuration."""
    return {name: value for name, value in settings.items() if name.startswith(PREFIX)}


def apply(config: LearningConfig, values: Mapping[str, Any]) -> LearningConfig:
    """The configuration with these values in it.

    Raises:
        BadSetting: names the field, the value and what is wrong with it.
    """
    tree = config.model_dump()
    for name, value in values.items():
        *path, last = name.removeprefix(PREFIX).split(".")
        node: Any = tree
        for part in path:
            node = node.get(part)
            if not isinstance(node, dict):
                raise BadSetting(name, f"{name}: there is no such setting")
        node[last] = value
    try:
        return LearningConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = PREFIX + ".".join(str(part) for part in first["loc"])
        message = f"{field}={first['input']!r}: {first['msg'].lower()}"
        raise BadSetting(field, message[:300]) from None
