"""Requests of a scenario in windows -> a cluster over HTTP -> tokens, steps, seconds and texts of each window."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from paceline.cluster.admin.key import VARIABLE as ADMIN_KEY
from paceline.cluster.errors import PacelineError
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_NAMES, Request
from paceline.deploy.bench import clients, http
from paceline.workers.replay import Text

_DRAFT = SOURCE_NAMES[SOURCE_DRAFT]


@dataclass(slots=True)
class Window:
    """What some requests came to."""

    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_by_draft: int = 0
    """Tokens that a draft model proposed."""
    seconds: float = 0.0
    ttft_s: float = 0.0
    """Of all requests together."""
    versions: set[str] = field(default_factory=set)
    """Of the drafts that took part."""

    def __add__(self, other: Window) -> Window:
        return Window(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_steps + other.num_steps,
            self.num_by_draft + other.num_by_draft,
            self.seconds + other.seconds,
            self.ttft_s + other.ttft_s,
            self.versions | other.versions,
        )

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)


def total(windows: Sequence[Window]) -> Window:
    """All of them as one."""
    return sum(windows, Window())


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster with learning, and its operator's API."""

    served: http.Served
    storage: Path
    """`learning.storage`: captured shards, and weights of versions under drafts/."""
    operator: httpx.Client

    def get(self, path: str) -> Any:
        """A document of the operator's API."""
        return self.operator.get(f"/admin/api/{path}").raise_for_status().json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """An operator's action."""
        answer = self.operator.post(f"/admin/api/{path}", json=dict(body))
        if answer.is_error:
            raise PacelineError(f"POST /admin/api/{path}: {answer.text[:400]}")
        return answer.json()

    def live_draft(self) -> Path | None:
        """Folder of the version that drafts for most; None for the configuration's."""
        live = self.get("overview")["live"]
        folder = self.storage / "drafts" / str(live["version"] if live else "")
        return folder if live and folder.is_dir() else None

    def run(self, requests: Sequence[Request], streams: int, salt: str, texts: dict[str, Text]) -> Window:
        """Send requests, `streams` at a time; their texts are added to `texts`.

        Raises:
            PacelineError: one failed.
        """
        model = self.served.model
        bodies = [
            clients.post(
                request,
                model=model,
                salt=f"{salt}/{request.id}",
                more={"metadata": {"domain": request.domain}, "return_token_ids": True},
            )
            for request in requests
        ]
        raws, spent = asyncio.run(clients.run(self.served.host, self.served.port, bodies, streams))
        window = Window(len(requests), seconds=spent.seconds)
        for request, raw in zip(requests, raws, strict=True):
            answer = clients.read(raw)
            window.num_tokens += answer.num_tokens
            window.ttft_s += answer.ttft_s
            window.num_steps += answer.metrics["num_steps"]
            window.num_by_draft += answer.metrics["tokens_by_source"][_DRAFT]
            window.versions.add(str(answer.metrics["draft_version"]))
            texts[request.id] = Text(request, tuple(answer.token_ids))
        window.versions.discard("")
        return window


@contextmanager
def learning_cluster(settings: Sequence[str]) -> Iterator[Cluster]:
    """Start a cluster with learning on, with a storage and an admin key of its own.

    Raises:
        PacelineError: it did not start.
    """
    storage = Path(tempfile.mkdtemp(prefix="paceline-learning-"))
    key, before = secrets.token_urlsafe(32), os.environ.get(ADMIN_KEY)
    os.environ[ADMIN_KEY] = key
    try:
        given = ["learning.enabled=true", f"learning.storage={storage}", *settings]
        with http.serving(given) as served:
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=served.control, headers=headers, timeout=30.0) as operator:
                yield Cluster(served, storage, operator)
    finally:
        if before is None:
            del os.environ[ADMIN_KEY]
        else:
            os.environ[ADMIN_KEY] = before
        shutil.rmtree(storage, ignore_errors=True)


def in_domain(requests: Sequence[Request], domain: str) -> list[Request]:
    """The same requests, said to be about this."""
    return [msgspec.structs.replace(request, domain=domain) for request in requests]


def changed(one: Mapping[str, Text], other: Mapping[str, Text]) -> int:
    """Requests whose text differs between two arms: by P1 none may."""
    assert one.keys() == other.keys(), "both arms were asked the same"
    return sum(one[name].output != other[name].output for name in one)
