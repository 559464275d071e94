"""`paceline keys`: a key is shown once, listed by id, and revoked by it; mistakes are one line."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from paceline.cluster.errors import PacelineError
from paceline.cluster.keys import KeyFile
from paceline.deploy.cli import app


def spawned(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as a user's."""
    environment = {**os.environ, "PACELINE_HOME": str(home), "COLUMNS": "200"}
    command = [sys.executable, "-m", "paceline.deploy.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@dataclass
class Done:
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


def run(home: Path, *arguments: str) -> Done:
    """In this process, two seconds sooner; the mistakes below are made in one of their own."""
    result = CliRunner(env={"PACELINE_HOME": str(home), "COLUMNS": "200"}).invoke(app, arguments)
    if isinstance(result.exception, PacelineError):
        return Done(2, result.stdout, str(result.exception))
    return Done(result.exit_code, result.stdout, result.stderr)


def test_keys_are_created_listed_and_revoked(tmp_path: Path) -> None:
    """In PACELINE_HOME, for the gateway that runs there; the list shows neither keys nor hashes."""
    store = KeyFile(tmp_path / "keys.json", recheck_s=0.0)
    assert "no API keys" in run(tmp_path, "keys", "list").stdout
    created = json.loads(run(tmp_path, "keys", "create", "ci", "--json").stdout)
    shown = run(tmp_path, "keys", "create", "[bold]team a[/bold]").stdout.split()[0]
    assert store.find(created["key"]) and store.find(shown)

    listed = run(tmp_path, "keys", "list")
    rows = json.loads(run(tmp_path, "keys", "list", "--json").stdout)
    assert [row["name"] for row in rows] == ["ci", "[bold]team a[/bold]"]
    assert set(rows[0]) == {
        *("id", "name", "created", "revoked", "tenant", "scope", "capture"),
        *("requests_per_minute", "tokens_per_minute", "concurrency"),
    }
    assert "[bold]team a[/bold]" in listed.stdout
    assert shown not in listed.stdout

    assert run(tmp_path, "keys", "revoke", created["id"]).returncode == 0
    assert store.find(created["key"]) is None
    assert store.find(shown)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """Exit status 2, no traceback; a gateway open to others is not started by mistake."""
    for arguments, expected in (
        (["keys", "revoke", "nope"], "'nope': no such key"),
        (["keys", "create", ""], "1 to 80 characters"),
        (["serve", "--set", "gateway.host=0.0.0.0", "--port", "0"], "paceline keys create"),
        (
            ["serve", "--set", "gateway.keys_file=keys.json", "--port", "0"],
            "expected an absolute path, or auto",
        ),
    ):
        done = spawned(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert expected in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr


def test_consent_is_given_and_withdrawn(tmp_path: Path) -> None:
    """With the key, and later by its id."""
    given = ["--tenant", "acme", "--capture", "asked"]
    created = json.loads(run(tmp_path, "keys", "create", "ci", *given, "--json").stdout)
    assert (created["tenant"], created["capture"]) == ("acme", "asked")
    shown = run(tmp_path, "keys", "list").stdout
    assert "acme" in shown and "asked" in shown
    assert run(tmp_path, "keys", "consent", created["id"], "--capture", "never").returncode == 0

    [row] = json.loads(run(tmp_path, "keys", "list", "--json").stdout)
    assert row["capture"] == "never"
    refused = run(tmp_path, "keys", "create", "ci", "--capture", "always")
    assert refused.returncode == 2 and "expected one of never, asked, default" in " ".join(
        refused.stderr.split()
    )


def test_a_key_has_a_scope_and_limits_of_its_own(tmp_path: Path) -> None:
    """Given with it, changed later; what is not given stays."""
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrency", "4"]
    key = json.loads(run(tmp_path, "keys", "create", "web", *limits, "--json").stdout)
    admin = json.loads(run(tmp_path, "keys", "create", "alice", "--scope", "admin", "--json").stdout)
    assert run(tmp_path, "keys", "limit", key["id"], "--concurrency", "0").returncode == 0

    shown = run(tmp_path, "keys", "list").stdout
    rows = {row["id"]: row for row in json.loads(run(tmp_path, "keys", "list", "--json").stdout)}
    assert "60 requests/min, 9000 tokens/min" in " ".join(shown.split())
    assert (rows[key["id"]]["requests_per_minute"], rows[key["id"]]["concurrency"]) == (60, 0)
    assert rows[admin["id"]]["scope"] == "admin"
    for wrong, expected in (
        (["--scope", "root"], "user, admin"),
        (["--concurrency", "-1"], "concurrency=-1: expected 0.."),
    ):
        refused = run(tmp_path, "keys", "create", "x", *wrong)
        assert refused.returncode == 2 and expected in " ".join(refused.stderr.split())
