"""Parts of the learning loop's benchmark: chosen by the command, and told even where a later one fails."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cluster.errors import PacelineError
from paceline.deploy.bench.learn import main as learn
from paceline.deploy.cli import app


def test_what_was_measured_is_told_though_a_later_part_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def swaps(task: object, found: learn.Found) -> None:
        found.figures["swap.changed"] = 0.0

    def guards(task: object, found: learn.Found) -> None:
        raise PacelineError("training did not begin")

    monkeypatch.setitem(learn._MEASURES, "swap", swaps)
    monkeypatch.setitem(learn._MEASURES, "guard", guards)
    out = Console(file=io.StringIO(), width=200)

    with pytest.raises(PacelineError, match="training did not begin"):
        learn.run(parts=["swap", "guard"], json_path=tmp_path / "found.json", out=out, err=out)
    told = json.loads((tmp_path / "found.json").read_text())

    assert told["figures"] == {"swap.changed": 0.0}
    assert told["notes"]["failed"] == {"guard": "PacelineError: training did not begin"}
    assert "swap.changed" in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [["--only", "swap,guard"], ["--only", "swap", "--only", "guard"]])
def test_parts_are_named_together_or_one_by_one(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(learn, "run", lambda **how: asked.append(how["parts"]))

    assert CliRunner().invoke(app, ["bench", "learn", *options]).exit_code == 0
    assert asked == [["swap", "guard"]]
