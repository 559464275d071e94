"""What the trainer and the process of its run say to each other -> lines of JSON over a socket pair."""

from __future__ import annotations

import msgspec

from paceline.cluster.types import DraftRef, TrainLevel, TrainOrder, TrainState


class Start(msgspec.Struct, frozen=True, tag=True):
    """trainer -> run, first."""

    config: str
    """The whole configuration as JSON."""
    order: TrainOrder
    level: TrainLevel
    folder: str
    is_idle: bool
    """To take only what cores have left over."""


class Set(msgspec.Struct, frozen=True, tag=True):
    """trainer -> run: take so much from now on. evict: save and end."""

    level: TrainLevel


class Progress(msgspec.Struct, frozen=True, tag=True):
    """run -> trainer, on every change; fields as in TrainerStatus, but the last."""

    state: TrainState = "idle"
    level: TrainLevel = "normal"
    step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    cpu_s: float = 0.0
    result: DraftRef | None = None
    report: bytes = b""
    error: str = ""
    yielded_s: float = 0.0
    """Waited because others wanted the machine."""


FINAL = ("done", "failed")
"""States of a run that nothing follows."""

_commands: msgspec.json.Decoder[Start | Set] = msgspec.json.Decoder(Start | Set)
_progress = msgspec.json.Decoder(Progress)


def encode(message: Start | Set | Progress) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Start | Set:
    """What the run reads."""
    return _commands.decode(line)


def decode_progress(line: bytes) -> Progress:
    """What the trainer reads."""
    return _progress.decode(line)
