"""YAML -> checked values: what all sections of the configuration are made of, their base and types of fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error rather than a silent nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Threads = Annotated[int, Field(ge=1, le=256)]
Resources = dict[str, Annotated[float, Field(gt=0, le=1024)]]
Cpus = Annotated[float, Field(gt=0, le=256)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""0 is no limit."""
