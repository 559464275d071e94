"""Arm a named point -> the first process that passes it as described fails there, once, and it is on record."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.cluster import failpoints
from paceline.cluster.errors import ConfigError
from paceline.cluster.failpoints import POINTS, VARIABLE, FailpointHit, Failpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def armed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failpoints:
    """This process is a decode worker that was started with failpoints."""
    found = Failpoints(tmp_path / "points")
    monkeypatch.setenv(VARIABLE, str(found.folder))
    monkeypatch.setattr(failpoints, "enabled", True)
    monkeypatch.setattr(failpoints, "_worker_id", "")
    monkeypatch.setattr(failpoints, "_folder", None)
    monkeypatch.setattr(failpoints, "_hits", {})
    failpoints.enter("decode-a")
    return found


def run_worker(folder: Path | None, code: str, worker: str = "decode-a") -> subprocess.CompletedProcess[str]:
    """A process of its own that says who it is, then runs `code`."""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    if folder is not None:
        environment[VARIABLE] = str(folder)
    script = f"from paceline.cluster import failpoints\nfailpoints.enter({worker!r})\n{textwrap.dedent(code)}"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_started_without_the_variable_cannot_be_armed(tmp_path: Path) -> None:
    """The point is armed, the file lies there, and nothing happens."""
    points = Failpoints(tmp_path / "points")
    points.arm("decode.mid_step")

    done = run_worker(None, "assert not failpoints.enabled\nfailpoints.hit('mid_step', 'r')\nprint('alive')")

    assert done.stdout == "alive\n" and points.fired() == []


def test_a_kill_is_on_record_although_the_process_is_gone(tmp_path: Path) -> None:
    """SIGKILL at the third hit of the named request; the record names point, process and request."""
    points = Failpoints(tmp_path / "points")
    points.arm("decode.mid_step", nth=3, request="r2")
    before = time.monotonic()

    done = run_worker(
        points.folder,
        """
        for step in range(9):
            failpoints.hit("mid_step", "r1-0", "r2-0")
            print(step, flush=True)
        """,
    )

    (fired,) = points.fired()
    assert done.returncode == -signal.SIGKILL and done.stdout.endswith("\n0\n1\n")
    assert (fired.point, fired.action, fired.worker) == ("decode.mid_step", "kill", "decode-a")
    assert fired.requests == ("r2-0",) and before < fired.monotonic < time.monotonic()
    assert points.disarm() == []


def test_one_arming_is_one_fault(armed_here: Failpoints) -> None:
    """It fires once; the next hits pass; armed anew it counts from the start."""
    for _ in range(2):
        armed_here.arm("decode.mid_step", action="error", nth=2)
        failpoints.hit("mid_step")
        with pytest.raises(FailpointHit):
            failpoints.hit("mid_step")
        failpoints.hit("mid_step")

    assert [f.worker for f in armed_here.fired()] == ["decode-a"] * 2


def test_of_two_processes_only_one_fails(tmp_path: Path) -> None:
    """Both pass the point at once; the file can be taken away only once."""
    points = Failpoints(tmp_path / "points")
    code = f"""
        import pathlib, time
        while not pathlib.Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.001)
        for _ in range(1000):
            failpoints.hit("mid_step")
        print("alive")
    """
    script = f"from paceline.cluster import failpoints\nfailpoints.enter('decode-a')\n{textwrap.dedent(code)}"
    environment = {**os.environ, VARIABLE: str(points.folder)}
    workers = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    points.arm("decode.mid_step")
    (tmp_path / "go").touch()
    outputs = sorted(worker.communicate(timeout=60)[0] for worker in workers)

    assert sorted(worker.returncode for worker in workers) == [-signal.SIGKILL, 0]
    assert outputs[1].endswith("alive\n") and len(points.fired()) == 1


def test_worker_and_request_narrow_it_down(armed_here: Failpoints) -> None:
    """Another worker's arming, another request's, another phase's: none of them is ours."""
    for how in ({"worker": "decode-b"}, {"request": "x"}):
        armed_here.arm("decode.mid_step", action="error", **how)
        failpoints.hit("mid_step", "r-1")
    armed_here.arm("decode.mid_step", action="error", worker="decode-a", request="r")
    failpoints.hit("mid_stream", "r-1")
    failpoints.hit("mid_step", "x", "y")

    with pytest.raises(FailpointHit):
        failpoints.hit("mid_step", "x", "r-1")
    assert armed_here.fired()[-1].requests == ("r-1",)


def test_a_delay_lasts_as_long_as_it_says(armed_here: Failpoints) -> None:
    armed_here.arm("decode.mid_transfer", action="delay", seconds=0.05)
    began = time.monotonic()
    failpoints.hit("mid_transfer", "r")

    assert 0.05 <= time.monotonic() - began < 1.0


def test_a_stopped_process_goes_on_after_sigcont(tmp_path: Path) -> None:
    points = Failpoints(tmp_path / "points")
    points.arm("decode.mid_stream", action="stop")
    script = (
        "from paceline.cluster import failpoints as f\nf.enter('decode-a')\nf.hit('mid_stream')\nprint('on')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, VARIABLE: str(points.folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        _, status = os.waitpid(worker.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and points.fired()[0].pid == worker.pid
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.communicate(timeout=60)[0].endswith("\non\n")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever can write there can end the process, so nobody else may."""
    folder = tmp_path / "points"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(ConfigError, match="mode 0700"):
        Failpoints(folder)
    done = run_worker(folder, "print('never')")
    assert done.returncode != 0 and "mode 0700" in done.stderr and done.stdout == ""


def test_a_link_to_a_folder_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    Failpoints(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    for name in ("link", "missing"):
        with pytest.raises(ConfigError, match=VARIABLE):
            failpoints.checked(tmp_path / name)


@pytest.mark.parametrize(
    ("point", "how"),
    [
        ("decode.nowhere", {}),
        ("mid_step", {}),
        ("decode.idle", {"action": "explode"}),
        ("decode.idle", {"nth": 0}),
    ],
)
def test_what_cannot_fire_cannot_be_armed(tmp_path: Path, point: str, how: dict[str, object]) -> None:
    """A misspelt point would make a test pass that tested nothing."""
    with pytest.raises(ConfigError, match="failpoint"):
        Failpoints(tmp_path / "points").arm(point, **how)


def test_every_named_point_is_in_the_code() -> None:
    """And the code has no point that cannot be armed."""
    named = {phase for phases in POINTS.values() for phase in phases}
    found = set()
    for package in ("cluster", "workers", "deploy"):
        for file in (ROOT / package).rglob("*.py"):
            found |= set(re.findall(r"failpoints\.hit\(\s*\"(\w+)\"", file.read_text()))

    assert found == named
