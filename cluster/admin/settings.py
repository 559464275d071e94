"""The `learning` section -> its fields with what is in force, and changes of those that can be changed while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.cluster.admin.answers import Scalar, Setting
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import Actor
from paceline.cluster.admin.desk import Desk
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.errors import PacelineError
from paceline.cluster.learning import overrides
from paceline.cluster.learning.config import LearningConfig

_PREFIX = "learning"
_SECTIONS = {
    "gate": "Gate",
    "rollout": "Rollout",
    "guard": "Guard",
    "train": "Training",
    "capture": "Capture",
}
_EDITABLE = frozenset({"gate", "rollout", "guard", "train"})
_EDITABLE_ALONE = frozenset({"train_automatically", "horizon_h", "min_return"})
_AT_START = frozenset({"rollout.resident"})
"""What processes settle when they start."""
_HIDDEN = frozenset({"storage", "registry"})
"""URLs may hold passwords."""
_UNITS = {
    "_rate": "",
    "_temperature": "",
    "_ms": "ms",
    "_s": "s",
    "_h": "h",
    "_mb": "MB",
    "requests": "requests",
    "tokens": "tokens",
    "steps": "steps",
}


class Settings:
    """The configuration, and what operators changed of it; their changes are kept in the registry."""

    def __init__(self, desk: Desk, audit: Audit) -> None:
        self._desk = desk
        self._audit = audit
        self._changed: dict[str, Scalar] = {}
        self._is_loaded = False
        self._lock = asyncio.Lock()
        self.changes = 0
        """Grows with each change."""

    async def all(self) -> list[Setting]:
        """Every field."""
        async with self._lock:
            await self._load()
            return self._shown()

    async def change(self, values: Mapping[str, Scalar | None], actor: Actor) -> list[Setting]:
        """Change these, all or none; None goes back to the configured value.

        Raises:
            AdminError: 422 names the field; 409 where learning is off.
        """
        try:
            loop = self._desk.needed_loop()
            async with self._lock:
                await self._load()
                _check_names(values)
                changed = {
                    name: value for name, value in self._changed.items() if values.get(name, 0) is not None
                }
                changed |= {name: value for name, value in values.items() if value is not None}
                config = _checked(self._desk.config.learning, changed)
                await asyncio.to_thread(loop.registry.put_settings, dict(values))
                loop.configure(config)
                self._changed = changed
                self.changes += 1
        except PacelineError as error:
            self._audit.note(actor, "settings", ", ".join(values)[:200], f"refused: {error}")
            raise
        for name, value in values.items():
            self._audit.note(actor, "settings", name, value="as configured" if value is None else value)
        await self._audit.flush()
        return self._shown()

    async def _load(self) -> None:
        loop = self._desk.loop
        if self._is_loaded or loop is None:
            return
        kept = await asyncio.to_thread(loop.registry.settings)
        changed = overrides.changed({key: setting.value for key, setting in kept.items()})
        try:
            overrides.apply(self._desk.config.learning, changed)
        except (
            overrides.BadSetting
        ):  # legal values have changed since: the configuration counts, for the loop too
            changed = {}
        self._changed, self._is_loaded = changed, True

    def _shown(self) -> list[Setting]:
        configured = self._desk.config.learning
        has_loop = self._desk.loop is not None
        shown = []
        for name, section, field in _fields():
            value = _value(configured, name)
            low, high = _limits(field)
            kind, choices = _kind(field)
            shown.append(
                Setting(
                    name=name,
                    section=section,
                    label=name.rpartition(".")[2].replace("_", " ").capitalize(),
                    help=" ".join((field.description or "").split()),
                    kind=kind,
                    unit=_unit(name, kind, low, high),
                    value=self._changed.get(name, value),
                    configured=value,
                    min=low,
                    max=high,
                    choices=choices,
                    editable=has_loop and _is_editable(name),
                )
            )
        return shown


def _fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """(path, section's title, field), in the order of the configuration."""
    for name, field in LearningConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for inner, inner_field in kind.model_fields.items():
                yield f"{_PREFIX}.{name}.{inner}", _SECTIONS[name], inner_field
        elif name not in _HIDDEN:
            yield f"{_PREFIX}.{name}", "Training", field


def _is_editable(name: str) -> bool:
    path = name.removeprefix(f"{_PREFIX}.")
    section, _, rest = path.partition(".")
    return path in _EDITABLE_ALONE or (bool(rest) and section in _EDITABLE and path not in _AT_START)


def _value(config: LearningConfig, name: str) -> Any:
    found: Any = config
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return ", ".join(map(str, found)) if isinstance(found, list | tuple) else found


def _check_names(values: Mapping[str, Scalar | None]) -> None:
    known = {name for name, _, _ in _fields()}
    for name in values:
        if name not in known:
            message = f"{name[:80]}: there is no such setting"
            raise AdminError(422, "invalid_value", message, "GET settings lists them", field=name[:80])
        if not _is_editable(name):
            message = f"{name}: is settled when the cluster starts"
            action = f"set {name} in the configuration and start again"
            raise AdminError(422, "not_editable", message, action, field=name)


def _checked(config: LearningConfig, changed: Mapping[str, Scalar]) -> LearningConfig:
    try:
        return overrides.apply(config, changed)
    except overrides.BadSetting as error:
        raise AdminError(422, "invalid_value", str(error), "correct this value", field=error.field) from None


def _kind(field: FieldInfo) -> tuple[Literal["number", "integer", "boolean", "choice", "text"], list[str]]:
    if get_origin(field.annotation) is Literal:
        return "choice", [str(choice) for choice in get_args(field.annotation)]
    if field.annotation is bool:
        return "boolean", []
    if field.annotation is int:
        return "integer", []
    return ("number" if field.annotation is float else "text"), []


def _limits(field: FieldInfo) -> tuple[float | None, float | None]:
    low = high = None
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            low = float(limit.ge)  # type: ignore[arg-type]
        elif isinstance(limit, annotated_types.Gt):
            low = float(limit.gt)  # type: ignore[arg-type]
        elif isinstance(limit, annotated_types.Le):
            high = float(limit.le)  # type: ignore[arg-type]
    return low, high


def _unit(name: str, kind: str, low: float | None, high: float | None) -> str:
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return unit
    return "share" if kind == "number" and high == 1.0 and low is not None and low >= 0 else ""
