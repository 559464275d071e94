"""Command lines -> messages that say what to do, a foreground cluster that ends with Ctrl-C, other Rays untouched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]

OTHER_RAY = """
import ray, sys
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
print("up", flush=True)
for line in sys.stdin:
    print(ray.get(ray.remote(lambda: 42).remote()), flush=True)
"""


@pytest.fixture
def other_ray() -> Iterator[subprocess.Popen[str]]:
    """Somebody else's Ray on the same machine."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OTHER_RAY],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline().strip() == "up"
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.mark.slow  # a second cluster and another Ray beside it; that `stop` leaves nothing is tested in each run
def test_ctrl_c_ends_the_foreground_cluster_and_nothing_else(
    other_ray: subprocess.Popen[str], tmp_path: Path
) -> None:
    """`paceline serve` stays in the foreground; SIGINT ends all of its processes; another Ray works on."""
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path)}
    arguments = ["serve", "--port", "0", "--set", "control.port=0", "--set", "draft.replicas=0"]
    process = subprocess.Popen(
        # Whoever started the tests in the background of a script told them to ignore it, and children inherit that.
        ["env", "--default-signal=INT", *PACELINE, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C ends it" in line:
            break
    else:
        process.wait(60)
        pytest.fail("".join(lines))
    mine = [p.pid for p in psutil.process_iter() if _home(p) == str(tmp_path) and p.pid != process.pid]
    assert len(mine) > 5

    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    code = process.wait(60)
    process.stdout.close()

    assert code == 0 and "stopped" in rest
    time.sleep(0.2)
    assert [
        pid for pid in mine if psutil.pid_exists(pid) and _home(psutil.Process(pid)) == str(tmp_path)
    ] == []
    assert other_ray.stdin is not None and other_ray.stdout is not None
    other_ray.stdin.write("go\n")
    other_ray.stdin.flush()
    assert other_ray.stdout.readline().strip() == "42"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "decode.threads=0"], "decode.threads=0: expected >= 1 (legal: 1..256, default 1)"),
        (["--set", "decode.thread=1"], "decode.thread: unknown field"),
        (["--preset", "nope"], "no preset of that name"),
        (["--set", "model.target=/nowhere"], "model folder '/nowhere': no config.json there"),
    ],
)
def test_a_users_mistake_is_one_message_with_field_and_range(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    """Exit status 2, no traceback, nothing started."""
    done = _run(tmp_path, "serve", "--detach", *arguments)

    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    """The message names field, value and the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(tmp_path, "serve", "--detach", "--port", str(port))

    assert done.returncode == 2
    assert f"gateway.port={port}" in done.stderr and "gateway.port=0" in done.stderr


def test_status_and_stop_without_a_cluster_say_so(tmp_path: Path) -> None:
    """Nothing running is an error for status and no error for stop."""
    status = _run(tmp_path, "status", "--json")
    stop = _run(tmp_path, "stop")

    assert status.returncode == 2 and "paceline serve" in status.stderr
    assert stop.returncode == 0


def test_explain_lists_every_field_with_its_meaning(tmp_path: Path) -> None:
    """The output names all sections and carries the docs."""
    done = _run(tmp_path, "explain")

    assert done.returncode == 0
    assert "decode.token_budget = 256" in done.stdout
    assert "link.timeout_s" in done.stdout and "poisons its link" in done.stdout


def _run(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_HOME": str(home), "COLUMNS": "200"}
    return subprocess.run(
        [*PACELINE, *args], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _home(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get("PACELINE_HOME")
    except (psutil.Error, OSError):
        return None
