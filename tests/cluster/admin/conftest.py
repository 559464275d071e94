"""Control with a scripted loop over a real registry on SQLite, for all tests of the admin API."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.key import hash_key
from paceline.cluster.config import load_config
from paceline.cluster.control import Control
from paceline.cluster.keys import KeyFile
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import Directory
from scripted_admin import KEY, LOCAL, WORKERS, ScriptedLoop, client_of, fill


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry's file with what `fill` puts there, made once: its tables take longer than most tests."""
    home = tmp_path_factory.mktemp("registry")
    registry = Registry.open("auto", home)
    fill(registry)
    registry.close()
    return home / "registry.db"


@pytest.fixture
def registry(tmp_path: Path, filled: Path) -> Iterator[Registry]:
    shutil.copy(filled, tmp_path / "registry.db")
    registry = Registry.open("auto", tmp_path)
    yield registry
    registry.close()


@pytest.fixture
def make_control(tmp_path: Path, registry: Registry) -> Callable[..., Control]:
    """Control with these settings; `learning=False` has no loop."""

    def make(*settings: str, learning: bool = True) -> Control:
        storage = [f"learning.storage={tmp_path}/learning", f"learning.enabled={str(learning).lower()}"]
        keys = KeyFile(tmp_path / "keys.json", recheck_s=0.0)
        control = Control(load_config(None, ["model.name=some-model", *storage, *settings]), keys=keys)
        control.on_directory(Directory(7, WORKERS))
        if learning:
            control.loop = ScriptedLoop(control.config.learning, registry)
        return control

    return make


@pytest.fixture
def control(make_control: Callable[..., Control]) -> Control:
    return make_control()


@pytest.fixture
def loop(control: Control) -> ScriptedLoop:
    assert isinstance(control.loop, ScriptedLoop)
    return control.loop


@pytest.fixture
def app(control: Control, tmp_path: Path) -> FastAPI:
    return build_admin_app(control, hash_key(KEY), bundle=Bundle(tmp_path / "nothing"))


@pytest.fixture
async def stranger(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody on this machine who has shown nothing."""
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def operator(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A program with the key."""
    async with client_of(app, authorization=f"Bearer {KEY}") as client:
        yield client


@pytest.fixture
async def browser(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that signed in: it has a cookie, and sends origin and token."""
    async with client_of(app) as client:
        answer = await client.post("/admin/api/session", json={"key": KEY}, headers={"origin": LOCAL})
        assert answer.status_code == 200, answer.text
        client.headers.update({"origin": LOCAL, "x-csrf-token": answer.json()["csrf"]})
        yield client
