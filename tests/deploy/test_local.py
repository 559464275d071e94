"""The end of a local cluster: bounded, whatever Serve waits for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.deploy import local

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_serve_that_never_shuts_down_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its processes are ended all the same, its folder is removed, and it is said."""
    import ray
    from ray import serve

    exits: list[int] = []
    monkeypatch.setenv(local.RUN_VARIABLE, "nobody")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("it would wait as well"))
    monkeypatch.setattr(serve, "shutdown", lambda: time.sleep(30))
    monkeypatch.setattr(local.os, "_exit", exits.append)
    folder = tmp_path / "ray"
    folder.mkdir()
    began = time.monotonic()
    local._stop(folder, 0.1)

    assert exits == [0] and not folder.exists() and time.monotonic() - began < 10
    assert "did not shut down" in capfd.readouterr().err
