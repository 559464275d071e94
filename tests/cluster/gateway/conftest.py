"""The gateway over scripted streams, for all tests of its HTTP side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

import scripted_gateway
from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    return scripted_gateway.byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def serve(
    tokenizer: Tokenizer, metrics: Metrics
) -> Callable[..., contextlib.AbstractAsyncContextManager[openai.AsyncOpenAI]]:
    """A real server on a free port for some scripted streams, and a client for it."""

    @contextlib.asynccontextmanager
    async def serve(streams: ScriptedStreams, **gateway: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            scripted_gateway.listening(tokenizer, metrics, streams, **gateway) as url,
            scripted_gateway.client_for(url) as client,
        ):
            yield client

    return serve
