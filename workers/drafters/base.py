"""Streams that are caught up -> draft trees: what the engine asks of every source of proposals, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, DraftOpen, WorkerInfo
from paceline.workers import drafters
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step made of one stream's tree: `path` are its accepted nodes; tree None means a plain step."""

    stream: Stream
    tree: Tree | None
    path: tuple[int, ...]


class Drafter:
    """A source of proposals. It may be wrong, late or silent; the text never depends on it.

    A new drafter is one file: `propose` and whatever of the rest it needs, registered under a name that is added to
    SOURCE_NAMES; `speculation.sources` asks for it by that name. What it keeps of a stream it keeps by `stream.key`.
    """

    name: str
    source: int = SOURCE_DRAFT
    """SOURCE_* of its nodes."""
    is_free: bool = False
    """It takes microseconds: it is asked as soon as a step is done, and others only where it found too little."""

    @property
    def weights(self) -> str:
        """Version of what it drafts with now. When that changes, what was learnt of it no longer counts."""
        return ""

    @property
    def beside(self) -> str:
        """Versions with which it drafts for some streams instead. When that changes, it is worth another look."""
        return ""

    def open(self, stream: Stream) -> None:
        """A stream that wants drafts was admitted. Its tokens are known, its KV may not be there yet."""

    def observe(self, streams: Sequence[Stream]) -> None:
        """These streams have new committed tokens. Called after commit, once a step, if it will be asked next."""

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        """A tree behind each stream's last token, or None."""
        return [None] * len(streams)

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        """What the step accepted of each caught-up stream, and what it cost."""

    def close(self, stream: Stream) -> None:
        """The stream ended or was cancelled."""

    def proposed(self, stream: Stream) -> Tree | None:
        """What a draft model alone proposed behind the stream's last token; None if that is no other than `propose`'s."""
        return None

    def version(self, stream: Stream) -> str:
        """Version of the weights that last drafted for the stream; empty if none did."""
        return ""


def draft_open(stream: Stream) -> DraftOpen:
    """All that a draft model must know of a stream, as it is now."""
    request = stream.request
    return DraftOpen(
        stream.key,
        tuple(stream.token_ids.tolist()),
        request.sampling,
        stream.num_prompt,
        request.stop_ids,
        request.cache_salt,
        request.tenant,
        request.domain,
    )


# --- by name --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may need of the engine that it is made for."""

    target: ModelRunner
    speculation: SpeculationConfig
    metrics: Metrics
    connect: Callable[[WorkerInfo], None] | None = None
    """Opens a connection to a draft worker; None where there are none."""
    draft: DraftEngine | None = None
    """A draft model in this process: then nobody else is asked."""


Factory = Callable[[Context], Drafter]
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorates what makes a drafter: a function of the context, or a class whose `__init__` takes one."""

    def keep(factory: Factory) -> Factory:
        assert name not in _FACTORIES, f"two drafters are registered as {name!r}"
        _FACTORIES[name] = factory
        return factory

    return keep


def names() -> list[str]:
    """Of all drafters: those of this folder's files, and what else was registered."""
    for module in pkgutil.iter_modules(drafters.__path__, f"{drafters.__name__}."):
        importlib.import_module(module.name)
    return sorted(_FACTORIES)


def make(name: str, context: Context) -> Drafter:
    """A fresh drafter of this name for one engine.

    Raises:
        ValueError: there is none of that name.
    """
    known = names()
    if name not in known:
        raise ValueError(f"drafter {name!r}: expected one of {', '.join(known)}")
    return _FACTORIES[name](context)
