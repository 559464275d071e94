"""README's commands, as printed -> run against the session's cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from paceline.deploy import cli

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_readmes_curl_streams_text_and_its_metrics(cluster: Any) -> None:
    """Server-sent events with text, the metrics shown in the README, and the end mark."""
    command = next(b for b in _blocks("bash") if "curl -N" in b).replace("http://127.0.0.1:8000", cluster.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)

    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert events[-1] == "[DONE]"
    assert json.loads(text)["type"] == "person" and len(chunks) > 5
    shown = set(re.findall(r'"(\w+)":', next(b for b in _blocks("json") if "tokens_by_source" in b)))
    sent = chunks[-1]["metrics"]
    assert shown - {"metrics"} <= set(sent) | set(sent["speculative_decoding"]) | set(
        sent["tokens_by_source"]
    )


def test_the_readmes_python_example_prints_an_answer(cluster: Any) -> None:
    """The real client, as a user would paste it."""
    program = _blocks("python")[0].replace("http://127.0.0.1:8000", cluster.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.startswith("ones: 8 + 5 + 0 = 13") and "'draft'" in done.stdout


def test_every_command_of_the_readme_exists() -> None:
    """Each `paceline VERB` named in the README answers --help, each `make VERB` is a target."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()

    for verb in set(re.findall(r"`paceline ([\w-]+)", README)):
        assert CliRunner().invoke(cli.app, [verb, "--help"]).exit_code == 0, verb
    for verb in set(re.findall(r"\bmake (\w+)(?=\s+#|`)", README)):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
