"""`paceline serve` on model folders that cannot work -> the reason at once, and nothing started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bundled import TARGET
from paceline.cluster.config import ClusterConfig, ModelConfig, model_folder
from paceline.cluster.errors import ModelError, PacelineError
from paceline.deploy import cli

DRAFT = model_folder(ModelConfig().draft)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """What would have been started, had this not been a test."""
    launched: list[ClusterConfig] = []

    def launch(_: Path, config: ClusterConfig) -> str:
        launched.append(config)
        raise PacelineError("not in this test")

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cli, "_launch", launch)
    return launched


def serve(target: Path, draft: Path, *settings: str) -> BaseException | None:
    """Run the command; what it was refused with."""
    pairs = [f"model.target={target}", f"model.draft={draft}", "control.port=0", *settings]
    options = [option for pair in pairs for option in ("--set", pair)]
    return CliRunner().invoke(cli.app, ["serve", "--port", "0", *options]).exception


def test_a_damaged_file_is_named(started: list[ClusterConfig], tmp_path: Path) -> None:
    """Target or draft: by headers alone, before a process is made."""
    folder = Path(shutil.copytree(TARGET, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for pair in ((folder, DRAFT), (TARGET, folder)):
        error = serve(*pair)

        assert isinstance(error, ModelError) and str(weights) in str(error)
    assert started == []


def test_a_draft_with_another_tokenizer_is_refused_unless_nothing_is_drafted(
    started: list[ClusterConfig], tmp_path: Path
) -> None:
    """With speculation off, or without draft workers, the draft's folder does not matter."""
    other = Path(shutil.copytree(DRAFT, tmp_path / "other"))
    tree = json.loads((other / "tokenizer.json").read_text())
    tree["added_tokens"][0]["content"] = "<|other|>"
    (other / "tokenizer.json").write_text(json.dumps(tree))
    error = serve(TARGET, other)
    assert isinstance(error, ModelError) and str(other) in str(error) and "<|other|>" in str(error)
    assert started == []

    serve(TARGET, other, "speculation.enabled=false")
    serve(TARGET, other, "draft.replicas=0")
    assert len(started) == 2
