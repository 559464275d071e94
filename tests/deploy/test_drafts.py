"""`paceline drafts` against Control's real admin API over a registry: tables, JSON, questions, and mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog
import uvicorn

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.key import hash_key
from paceline.cluster.config import load_config
from paceline.cluster.control import Control
from paceline.cluster.keys import KeyFile
from paceline.cluster.learning.views import Alarm, Result
from paceline.cluster.registry.records import AuditRow, Version
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import Directory
from paceline.deploy import cli
from scripted_admin import KEY, WORKERS, ScriptedLoop, fill


class Done(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join(self.err.split())


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry.open("auto", tmp_path)
    fill(registry)
    yield registry
    registry.close()


@pytest.fixture
def control(tmp_path: Path, registry: Registry) -> Control:
    config = load_config(None, ["learning.enabled=true", f"learning.storage={tmp_path}/learning"])
    control = Control(config, keys=KeyFile(tmp_path / "control-keys.json", recheck_s=0.0))
    control.on_directory(Directory(7, WORKERS))
    control.loop = ScriptedLoop(control.config.learning, registry)
    return control


@pytest.fixture
def loop(control: Control) -> ScriptedLoop:
    assert isinstance(control.loop, ScriptedLoop)
    return control.loop


@pytest.fixture
def url(control: Control, tmp_path: Path) -> Iterator[str]:
    """Control's listener, in a thread."""
    app = build_admin_app(control, hash_key(KEY), bundle=Bundle(tmp_path / "nothing"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


Run = Callable[..., Done]


@pytest.fixture
def run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`paceline drafts`, or `keys`, with these words, the key and the address of the environment; `answer` is what is typed."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "240")
    (tmp_path / "run" / "local").mkdir(parents=True)
    (tmp_path / "run" / "local" / "state.json").write_text(json.dumps({"control": url}))
    (tmp_path / "admin.key").write_text(KEY + "\n")
    (tmp_path / "admin.key").chmod(0o600)

    def call(*words: str, answer: str = "") -> Done:
        command = [] if words[0] == "keys" else ["drafts"]
        monkeypatch.setattr(sys, "argv", ["paceline", *command, *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        capsys.readouterr()
        status = 0
        try:
            with structlog.testing.capture_logs():  # the server's, which in this test is in the same process
                cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        found = capsys.readouterr()
        return Done(status, found.out, found.err)

    return call


def test_versions_are_listed_and_shown(run: Run) -> None:
    """As tables and as the API's JSON."""
    listed = run("list")
    assert listed.status == 0, listed.err
    first, *_, last = [line for line in listed.out.splitlines() if "v0" in line or "v1" in line]
    assert "live" in first and "+5.0% (+2.0% to +8.0%)" in first
    assert "retired" in last
    assert [item["version"] for item in json.loads(run("list", "--json").out)["items"]] == ["v1", "v0"]
    assert [
        item["version"] for item in json.loads(run("list", "--state", "live", "--json").out)["items"]
    ] == ["v1"]
    assert json.loads(run("list", "--tag", "domain:x", "--json").out)["total"] == 0
    assert json.loads(run("list", "--tag", "", "--json").out)["total"] == 2
    assert "1 of 2; --limit shows more" in run("list", "--limit", "1").out

    shown = run("show", "v1")
    assert shown.status == 0, shown.err
    for words in ("parent: v0", "acme", "gate: passed", "saves +5.0%", "acceptance: 0.5 -> 0.6"):
        assert words in shown.out
    assert json.loads(run("show", "v1", "--json").out)["sha256"] == "ab" * 32


def test_gate_runs_ledger_audit_and_status_are_shown(run: Run, loop: ScriptedLoop) -> None:
    """A gate's report is found by the version and by the run that made it."""
    loop.alarms = {"registry": Alarm("registry", 1.0, "the registry does not answer")}
    for words, expected in (
        (["gate", "v1"], "gate: passed: saves 5 %"),
        (["gate", "run1"], "gate: passed: saves 5 %"),
        (["runs"], "run1"),
        (["ledger"], "1 runs: 30.0 s saved, 25.0 s spent, net 5.0 s"),
        (["ledger"], "would not pay"),
        (["status"], "waits for 12 more requests"),
        (["status"], "the registry does not answer"),
    ):
        done = run(*words)
        assert done.status == 0, done.err
        assert expected in done.out
        assert json.loads(run(*words, "--json").out)
    assert run("audit").status == 0


def test_actions_reach_the_loop_and_the_audit(run: Run, loop: ScriptedLoop) -> None:
    """With the reason; what Control answers is printed."""
    loop.result = Result(True, "v1 is live now")
    calls = (
        (["train", "--tag", "domain:code", "--reason", "now"], ("train", "domain:code")),
        (["pause"], ("pause", "")),
        (["resume"], ("resume", "")),
        (["canary", "v1"], ("canary", "v1")),
        (["promote", "v1", "--tag", "tenant:acme"], ("promote", "v1@tenant:acme")),
        (["promote", "v1", "--force", "--yes"], ("promote", "v1")),
        (["pin"], ("pin", "")),
        (["unpin", "--tag", "domain:code"], ("unpin", "domain:code")),
        (["rollback", "--yes"], ("roll_back", "")),
        (["rollback", "--yes", "--tag", "domain:code"], ("roll_back", "domain:code")),
        (["revoke", "v1", "-y"], ("revoke", "v1")),
        (["delete-data", "--tenant", "acme", "--yes"], ("delete", "tenant:acme")),
        (["delete-data", "--request", "req 1/é", "--yes"], ("delete", "request:req 1/é")),
    )
    for words, expected in calls:
        done = run(*words)
        assert (done.status, done.out) == (0, "v1 is live now\n"), (words, done.err)
        assert loop.calls[-1][:2] == expected
    assert loop.calls[0][3] == {"force": False, "reason": "now"}
    assert loop.calls[5][3] == {"force": True, "reason": ""}

    rows = json.loads(run("audit", "--json").out)["items"]
    assert [row["action"] for row in rows] == [call[1][0] for call in reversed(calls)]
    assert all(row["ok"] for row in rows)
    assert run("audit", "--action", "revoke").out.count("revoke") >= 1
    assert json.loads(run("audit", "--action", "revoke", "--json").out)["total"] == 1
    assert json.loads(run("pause", "--json").out)["message"] == "v1 is live now"


@pytest.mark.parametrize(
    "words",
    [
        ["rollback"],
        ["revoke", "v1"],
        ["forget", "run1"],
        ["promote", "v1", "--force"],
        ["canary", "v1", "--force"],
        ["delete-data", "--tenant", "acme"],
    ],
)
def test_what_destroys_asks_once(run: Run, loop: ScriptedLoop, words: list[str]) -> None:
    """No is no; where nobody can be asked, nothing is done."""
    refused = run(*words, answer="n\n")
    assert (refused.status, loop.calls) == (1, [])
    assert "nothing was done" in refused.out
    nobody = run(*words)
    assert (nobody.status, loop.calls) == (2, [])
    assert "--yes does not ask" in nobody.words

    agreed = run(*words, answer="y\n")
    if words[0] != "forget":  # the scripted loop knows no run to end
        assert (agreed.status, len(loop.calls)) == (0, 1), agreed.err
    assert agreed.err.count("[y/N]") == 1


def test_a_refusal_says_why_and_what_to_do(run: Run, loop: ScriptedLoop, control: Control) -> None:
    """One line on stderr, exit status 2, no traceback."""
    loop.result = Result(False, "the gate refused v1: no saving; --force deploys it nevertheless")
    assert "the gate refused v1" in run("promote", "v1").words
    assert "v9" in run("show", "v9").words
    assert "v9" in run("gate", "v9").words
    assert "v9" in run("promote", "v9").words
    assert "expected --tenant NAME or --request ID" in run("delete-data").words
    assert "one of them" in run("delete-data", "--tenant", "a", "--request", "b").words
    assert "expected tenant:NAME" in run("train", "--tag", "nonsense").words
    assert "expected the name" in run("show", "..").words
    control.loop = None
    off = run("train")
    assert off.status == 2 and "learning.enabled=true" in off.words
    assert "no versions; learning is off" in run("list").out
    for words in (["promote", "v1"], ["show", "v9"], ["train"]):
        done = run(*words)
        assert (done.status, done.out) == (2, ""), words
        assert "Traceback" not in done.err


def test_a_missing_or_wrong_key_says_where_it_is_looked_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--key before the environment before the file; the key itself is never printed."""
    wrong = "pla_" + "w" * 40
    first = run("--key", wrong, "list")
    assert first.status == 2
    assert (
        "not valid; give the key with --key or PACELINE_ADMIN_KEY" in first.words and wrong not in first.err
    )
    monkeypatch.setenv("PACELINE_ADMIN_KEY", wrong)
    assert run("list").status == 2
    assert run("--key", KEY, "list").status == 0
    monkeypatch.setenv("PACELINE_ADMIN_KEY", KEY)
    (tmp_path / "admin.key").unlink()
    assert run("list").status == 0
    monkeypatch.delenv("PACELINE_ADMIN_KEY")
    missing = run("list")
    assert missing.status == 2 and "no admin key: give it with --key or PACELINE_ADMIN_KEY" in missing.words


def test_nobody_there_and_somebody_else_there(run: Run) -> None:
    """Neither is a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nobody = run("--url", f"http://127.0.0.1:{port}", "list")
    assert nobody.status == 2 and f"control at http://127.0.0.1:{port} does not answer" in nobody.words
    assert "expected an address" in run("--url", "localhost:8001", "list").words
    assert "expected an address" in run("--url", "ftp://x", "list").words


def test_a_registry_that_is_away_is_told(run: Run, loop: ScriptedLoop, tmp_path: Path) -> None:
    """The status, which needs none, goes on."""
    loop.registry.close()
    loop.registry = Registry("postgresql://nobody@/none?host=/nonexistent", tmp_path)
    away = run("list")
    loop.registry.close()

    assert away.status == 2 and "registry" in away.words
    assert run("status").status == 0


def test_the_key_does_not_pass_a_proxy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control is on this machine: a proxy of the environment would see the key."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run("list").status == 0


def test_names_of_strangers_do_not_steer_the_terminal(run: Run, registry: Registry) -> None:
    """Neither by escape codes nor by Rich's markup."""
    registry.add_version(
        Version("v2", tag="domain:\x1b[31m[bold]x", created=9.0, reason="\x1b]0;title\x07[link=x]")
    )
    registry.add_audit(AuditRow(1.0, "ops", "pin", "\x1b[2J"))
    for words in (["list"], ["show", "v2"], ["audit"]):
        found = run(*words)
        assert found.status == 0, found.err
        assert "\x1b" not in found.out and "\x07" not in found.out
    assert "[bold]x" in run("list").out


def test_the_command_is_there(tmp_path: Path) -> None:
    """`paceline drafts` on a machine where nothing runs and nothing is configured."""
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path), "PACELINE_ADMIN_KEY": KEY}
    command = [sys.executable, "-m", "paceline.deploy.cli", "drafts", "--url", "http://127.0.0.1:9", "list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert "does not answer" in " ".join(done.stderr.split())


# --- paceline keys --url --------------------------------------------------------------------------------------


def test_keys_are_made_changed_and_revoked_at_a_control_far_away(
    run: Run, url: str, control: Control, tmp_path: Path
) -> None:
    """With the same words as in a file here, which is not touched; each change is in the audit trail."""
    given = ("--tenant", "acme", "--concurrency", "3", "--url", url, "--json")
    made = json.loads(run("keys", "create", "web", *given).out)
    limited = run("keys", "limit", made["id"], "--requests-per-minute", "60", "--url", url)
    agreed = run("keys", "consent", made["id"], "--capture", "asked", "--url", url)
    assert (limited.status, agreed.status) == (0, 0), limited.err + agreed.err
    assert "60 requests/min, 3 at once" in limited.out
    [row] = json.loads(run("keys", "list", "--url", url, "--json").out)
    revoked = run("keys", "revoke", made["id"], "--url", url)

    assert control.keys is not None
    assert control.keys.file.find(made["key"]) is None and "revoked" in revoked.out
    assert (row["requests_per_minute"], row["tokens_per_minute"], row["concurrency"]) == (60, 0, 3)
    assert (row["tenant"], row["scope"], row["capture"], row["revoked"]) == ("acme", "user", "asked", None)
    assert row.keys() == made.keys() - {"key"}
    assert not (tmp_path / "keys.json").exists()
    audited = json.loads(run("audit", "--json").out)["items"]
    assert [item["action"] for item in audited if item["action"].startswith("key_")] == [
        "key_revoke", "key_change", "key_change", "key_create",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("revoke", "0" * 12), "there is no key"),
        (("revoke", "../actions/pause"), "expected letters and digits"),
        (("create", "x", "--scope", "root"), "scope"),
        (("create", "x", "--file", "/nowhere"), "--file and --url: give one of them"),
        (("limit", "0" * 12), "give one of --requests-per-minute"),
        (("list", "--key", "pla_" + "x" * 40), "the admin key is not valid"),
    ],
)
def test_mistakes_about_keys_are_one_line(run: Run, url: str, words: tuple[str, ...], expected: str) -> None:
    done = run("keys", *words, "--url", url)

    assert done.status == 2 and expected in done.words, done
    assert "Traceback" not in done.err
