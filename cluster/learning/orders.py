"""What control knows and a run needs <-> `TrainOrder.settings`: JSON, in which what is missing has its default."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.errors import ConfigError
from paceline.cluster.types import DraftRef


class OrderSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one run, beside its order."""

    target: str = ""
    """Version of the target whose texts count; "" is the configuration's."""
    look: int = 1
    """When scoring: how many candidates were scored on this held-out set, this one included."""
    step_rows: tuple[int, ...] = ()
    step_seconds: tuple[float, ...] = ()
    """The decode worker's own step times by number of rows, as its controller has them now; empty: not known, measure."""
    streams: int = 1
    """That share a step, on average."""
    rank: tuple[DraftRef, ...] = ()
    """When scoring: instead of one candidate, all of these against the base on the latest texts (`scoring.rank`). The report
    is {"ranked": [{version, saving: {mean, lo, hi}, acceptance, tokens_per_step}]}, best first, the base among them."""
    since: float = 0.0
    """When training: what was captured since then is fresh."""
    train: dict[str, Any] = {}
    gate: dict[str, Any] = {}
    """Fields of `learning.train` and `learning.gate` that operators changed while the cluster ran; others are as configured."""

    def encode(self) -> bytes:
        """As `TrainOrder.settings`."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, settings: bytes) -> OrderSettings:
        """Unknown fields are left out: a newer control may know more.

        Raises:
            ConfigError: it is no JSON of such fields.
        """
        try:
            return msgspec.json.decode(settings, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"order settings: {error}") from error
