"""JSON that operators send -> checked values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Name = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Of a version, tag, tenant or request: one line."""


class Body(BaseModel):
    """Base of all: an unknown field is an error rather than a silent nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SignIn(Body):
    """What opens a session."""

    key: Annotated[str, Field(min_length=1, max_length=512)]


Amount = Annotated[StrictInt, Field(ge=0, le=1_000_000_000)]


class KeyCreate(Body):
    """A new API key."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    """Whose it is, or what for."""
    tenant: Annotated[str, Field(max_length=80)] = ""
    """Whose requests those with it are; the name, if left out."""
    scope: Literal["user", "admin"] = "user"
    capture: Literal["never", "asked", "default"] = "never"
    requests_per_minute: Amount = 0
    """0 is the configuration's default, here and below."""
    tokens_per_minute: Amount = 0
    concurrency: Amount = 0


class KeyUpdate(Body):
    """What to change of an API key; what is left out stays."""

    capture: Literal["never", "asked", "default"] | None = None
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrency: Amount | None = None


class SettingsChange(Body):
    """Settings to change, all or none of them."""

    values: Annotated[
        dict[Name, StrictBool | StrictInt | StrictFloat | StrictStr | None],
        Field(min_length=1, max_length=64),
    ]
    """Name to value; null goes back to the configured one."""


class ActionBody(Body):
    """What an action acts upon; which fields it takes depends on the action."""

    version: Name | None = None
    run_id: Name | None = None
    tag: Name | None = None
    """"" (everything that has no version of its own), tenant:NAME or domain:NAME."""
    tenant: Name | None = None
    request_id: Name | None = None
    force: StrictBool | None = None
    """Against the gate's answer."""
    confirm: Name | None = None
    """Repeats what a destructive action acts upon."""
    reason: Annotated[str, Field(max_length=1000)] | None = None
    """Free text for the audit."""
