"""Things that are wrong -> findings that name them and say what to do; things that are right -> none of that."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cluster.config import load_config
from paceline.deploy import cli
from paceline.deploy.doctor import machine as machine_module
from paceline.deploy.doctor.cluster import Cluster
from paceline.deploy.doctor.findings import Check, Finding, ok, run
from paceline.deploy.doctor.machine import Machine, clock, ray_is_closed


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for name in (
        "PACELINE_ADMIN_KEY",
        "PACELINE_API_KEY",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def findings(check: str, *settings: str, is_running: bool = False) -> dict[str, Finding]:
    """Of one check of the machine, by name."""
    wanted = [c for c in Machine(load_config(None, settings), is_running).checks() if c[0] == check]
    return {finding.check: finding for finding in run(wanted)}


def one(check: str, *settings: str) -> Finding:
    (found,) = findings(check, *settings).values()
    return found


# --- how checks are run ---------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    checks: list[Check] = [("one", broken), ("two", lambda: ok("two", "fine"))]
    found = list(run(checks))

    assert [(f.check, f.level) for f in found] == [("one", "fail"), ("two", "ok")]
    assert "ZeroDivisionError" in found[0].found and found[0].what_to_do


# --- the machine ----------------------------------------------------------------------------------------


def test_this_machine_runs_what_is_bundled() -> None:
    """Where these tests run, the laptop's preset works: nothing fails."""
    found = list(run(Machine(load_config("laptop", ["gateway.port=0", "control.port=0"])).checks()))

    assert [f for f in found if f.level == "fail"] == []
    assert {"Python", "packages", "Ray", "torch", "cores", "memory", "/dev/shm", "model.target", "model.draft", "gateway.port",
            "link.interface", "API keys", "Ray's token", "clock"} <= {f.check for f in found}  # fmt: skip
    assert all(f.what_to_do for f in found if f.level == "warn")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = findings("ports", f"gateway.port={port}", "control.port=0")

    assert found["gateway.port"].level == "fail" and str(port) in found["gateway.port"].found
    assert "gateway.port=0" in found["gateway.port"].what_to_do
    assert found["control.port"].level == "ok"
    assert findings("ports", f"gateway.port={port}", is_running=True)["gateway.port"].level == "ok"


def test_addresses_of_other_machines_are_named() -> None:
    found = one("link.interface", "link.interface=192.0.2.7")
    listening = findings("ports", "gateway.host=192.0.2.7", "gateway.auth=none")["gateway.port"]

    assert found.level == "fail" and "127.0.0.1" in found.what_to_do
    assert listening.level == "fail" and "gateway.host" in listening.what_to_do
    assert one("link.interface", "link.interface=127.0.0.0/8").level == "ok"
    assert one("link.interface", "link.interface=198.51.100.0/24").level == "fail"


def test_models_that_are_not_there_or_do_not_fit(tmp_path: Path) -> None:
    missing = one("models", "model.target=/nowhere")
    assert missing.level == "fail" and "/nowhere" in missing.found

    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"not weights")
    assert one("models", f"model.target={broken}").level == "fail"


def test_threads_and_memory_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    too_wide = one("cores", "decode.threads=256")
    assert too_wide.level == "fail" and "decode.threads" in too_wide.what_to_do

    monkeypatch.setattr(machine_module, "usable_cores", lambda: (8, 0.5))
    assert one("cores").level == "warn"
    monkeypatch.setattr(machine_module, "available_memory", lambda: 1 << 30)
    assert one("memory", "decode.replicas=3").level == "fail"
    monkeypatch.setattr(machine_module, "available_memory", lambda: 1 << 40)
    assert one("memory", "decode.replicas=3").level == "ok"


def test_a_small_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's default is 64 MB."""

    class Usage:
        total = free = 60 << 20

    monkeypatch.setattr(machine_module.shutil, "disk_usage", lambda path: Usage)

    assert one("/dev/shm").level == "warn" and "--shm-size" in one("/dev/shm").what_to_do
    assert one("/dev/shm", "link.backend=shm").level == "fail"


def test_gpus_that_are_asked_for_and_absent() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = one("torch", "decode.num_gpus=1")
    assert found.level == "fail" and found.what_to_do


def test_an_open_gateway_without_keys_is_told() -> None:
    (found,) = findings("keys", "gateway.host=0.0.0.0").values()

    assert found.level == "fail" and "paceline keys create" in found.found


def test_an_admin_key_that_others_can_read_is_told(home: Path) -> None:
    home.mkdir()
    (home / "admin.key").write_text("pla_" + "x" * 40)
    (home / "admin.key").chmod(0o644)

    assert findings("keys")["keys"].level == "fail"
    (home / "admin.key").chmod(0o600)
    assert findings("keys")["admin key"].level == "ok"


def test_a_ray_that_is_open_to_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard that answers without a token, one that does not, and a mode that says so."""
    with answering({"/api/version": (200, {})}) as url:
        assert ray_is_closed(url).level == "fail"
    with answering({"/api/version": (401, {})}) as url:
        assert ray_is_closed(url).level == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_is_closed("http://127.0.0.1:1").level == "fail"
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    assert ray_is_closed("http://127.0.0.1:1").level == "fail"


def test_registry_and_storage_are_asked_only_where_something_is_learned(tmp_path: Path) -> None:
    assert (one("registry").level, one("capture's storage").level) == ("skip", "skip")
    on = ("learning.enabled=true",)
    assert one("registry", *on).level == "ok"  # SQLite, to be made
    assert one("capture's storage", *on, f"learning.storage={tmp_path}/shards").level == "ok"
    assert list((tmp_path / "shards").iterdir()) == []

    (tmp_path / "file").write_text("")
    assert one("capture's storage", *on, f"learning.storage={tmp_path}/file/below").level == "fail"
    with socket.socket() as closed:  # bound and not listening: refused at once
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        gone = one("registry", *on, f"learning.registry=postgresql://user@127.0.0.1:{port}/paceline")
    assert gone.level == "fail" and str(port) in gone.found


def test_the_clock_is_read_from_the_kernel() -> None:
    assert clock().level in ("ok", "warn", "skip")


# --- a cluster ------------------------------------------------------------------------------------------

WORKERS = [
    {"role": role, "id": f"{role}-1", "state": "ready", "version": version}
    for role, version in (
        ("router", ""),
        ("gateway", ""),
        ("decode", "aaa"),
        ("prefill", "aaa"),
        ("control", ""),
    )
]
COMPLETION = {
    "choices": [{"text": "42"}],
    "usage": {"completion_tokens": 1},
    "metrics": {"kv_source": ["link"]},
}
WELL: dict[str, tuple[int, Any]] = {
    "/ready": (200, {}),
    "/health": (200, {}),
    "/admin/api/status": (200, {"workers": WORKERS, "learning": {"alarms": []}}),
    "/metrics": (200, "".join(f'x{{worker="{worker["id"]}"}} 1\n' for worker in WORKERS)),
    "/v1/completions": (200, COMPLETION),
}


@contextmanager
def answering(answers: dict[str, tuple[int, Any]], date: str = "") -> Iterator[str]:
    """An HTTP server with these answers; a list gives one after the other."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, body = answers.get(self.path, (404, {}))
            if isinstance(body, list):
                body = body.pop(0)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string()

        def log_message(self, *_: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def cluster_findings(url: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in run(Cluster(url, url).checks())}


def test_a_well_cluster_has_nothing_wrong() -> None:
    with answering(WELL) as url:
        found = cluster_findings(url)

    assert {f.level for f in found.values()} == {"ok"}, found
    assert "twice the same" in found["completion"].found and "link" in found["completion"].found


@pytest.mark.parametrize(
    ("changed", "check", "level", "says"),
    [
        ({"/ready": (503, {})}, "gateway", "fail", "503"),
        ({"/admin/api/status": (401, {})}, "control", "fail", "admin key"),
        ({"/admin/api/status": (200, {"workers": WORKERS[:2]})}, "decode", "fail", "none is there"),
        ({"/admin/api/status": (200, {"workers": [*WORKERS, {**WORKERS[3], "version": "bbb"}]})}, "target", "fail", "different"),
        ({"/admin/api/status": (200, {"workers": WORKERS, "learning": {"alarms": ["no disk"]}})}, "learning", "warn", "no disk"),
        ({"/metrics": (200, 'x{worker="decode-1"} 1\n')}, "metrics", "fail", "prefill-1"),
        ({"/v1/completions": (401, {})}, "completion", "fail", "API key"),
        ({"/v1/completions": (500, "broken")}, "completion", "fail", "broken"),
        ({"/v1/completions": (200, [COMPLETION, {**COMPLETION, "choices": [{"text": "43"}]}])}, "completion", "fail", "'43'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_cluster_is_named(changed: Any, check: str, level: str, says: str) -> None:
    with answering({**WELL, **changed}) as url:
        found = cluster_findings(url)

    assert found[check].level == level and says in found[check].found
    assert found[check].what_to_do


def test_clocks_that_are_apart_are_told() -> None:
    with answering(WELL, date="Mon, 01 Jan 2024 00:00:00 GMT") as url:
        assert cluster_findings(url)["clocks"].level == "warn"


def test_a_cluster_that_is_not_there_is_no_traceback() -> None:
    found = cluster_findings("http://127.0.0.1:1")

    assert found["gateway"].level == found["control"].level == found["completion"].level == "fail"


# --- the command ----------------------------------------------------------------------------------------


def doctor(*args: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--set", "control.port=0", *args])
    return done.exit_code, json.loads(done.stdout)


def test_the_exit_status_says_whether_something_does_not_work() -> None:
    code, report = doctor("--set", "gateway.port=0")
    assert code == 0 and report["ok"]
    assert {finding["where"] for finding in report["findings"]} == {"this machine"}

    code, report = doctor("--set", "gateway.port=0", "--set", "model.target=/nowhere")
    (failed,) = [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert code == 1 and not report["ok"] and failed["what_to_do"]


def test_a_cluster_elsewhere_is_asked() -> None:
    with answering(WELL) as url:
        code, report = doctor("--set", "gateway.port=0", "--gateway", url, "--control", f"{url}/")

    assert code == 0
    assert {f["check"] for f in report["findings"] if f["where"] == "the cluster"} >= {
        "gateway",
        "completion",
        "metrics",
    }


def test_the_table_says_what_to_do() -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--set", "gateway.port=0", "--set", "decode.threads=256"])

    assert done.exit_code == 1
    assert "decode.threads=" in done.stdout and "1 that do not work" in done.stdout
    assert os.environ["PACELINE_HOME"]
