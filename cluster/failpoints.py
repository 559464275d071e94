"""A named point that a process passes -> nothing, or the fault that a test armed for exactly that point.

Off unless the process started with PACELINE_FAILPOINTS, which names a folder that only its owner may enter; whoever can
write there owns the processes anyway. A test arms a point by putting a file there, and the first process to pass the
point takes the file away, notes what it is about to do in `fired.jsonl`, and does it: one arming, one fault, and a
record that outlives the process.

Call sites cost one truth test: `if failpoints.enabled: failpoints.hit("mid_step", request_id)`.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import structlog

from paceline.cluster.errors import ConfigError, PacelineError

log = structlog.get_logger(__name__)

VARIABLE = "PACELINE_FAILPOINTS"
enabled = VARIABLE in os.environ
"""The one truth test. Set from the environment when this module is first imported, by tests afterwards."""

Action = Literal["kill", "stop", "delay", "error", "node"]
"""node: kill every process that this one's raylet started, and the raylet, as when a machine goes."""

POINTS = {
    "prefill": ("idle", "mid_step", "mid_transfer", "committed"),
    "decode": ("idle", "mid_transfer", "mid_step", "mid_stream"),
    "draft": ("idle", "mid_step", "mid_stream"),
    "gateway": ("beat", "mid_stream"),
    "router": ("beat", "route"),
    "control": ("beat", "snapshot"),
}
"""Role -> the phases it passes. beat: once a second, whatever else happens. mid_step: between forward and commit.
mid_transfer: a KV message was sent, or received. mid_stream: tokens, or drafts, were sent and more will be."""

_FIRED = "fired.jsonl"
_worker_id = ""
_folder: Path | None = None
_hits: dict[str, tuple[int, int]] = {}
"""Point -> (the arming that is counted, hits of it)."""


class FailpointHit(PacelineError):
    """Raised by a point that was armed with `error`."""


@dataclass(frozen=True, slots=True)
class Arming:
    """What is to happen, where and when."""

    point: str
    """`role.phase`."""
    action: Action = "kill"
    nth: int = 1
    """The fault comes at this hit that matches, counted in each process."""
    request: str = ""
    """Only hits of requests whose id begins so."""
    worker: str = ""
    """Only in this worker."""
    seconds: float = 0.0
    """How long `delay` lasts."""


@dataclass(frozen=True, slots=True)
class Fired:
    """One line of the record."""

    point: str
    action: str
    worker: str
    pid: int
    requests: tuple[str, ...]
    """The streams that passed the point together, those that matched."""
    monotonic: float
    """When, by the machine's monotonic clock: processes of one machine share it."""


# --- in the process that fails --------------------------------------------------------------------------


def enter(worker_id: str) -> None:
    """Say who this process is. The first name stays: a process has one.

    Raises:
        ConfigError: the folder is not its owner's alone.
    """
    global _worker_id, _folder
    if not enabled or _worker_id:
        return
    _folder = checked(Path(os.environ[VARIABLE]))
    _worker_id = worker_id
    log.warning("failpoints_enabled", worker=worker_id, folder=str(_folder))


def checked(folder: Path) -> Path:
    """The folder, if nobody but this user can write or read there.

    Raises:
        ConfigError: it is missing, somebody else's, or open to others.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{VARIABLE}={folder}: expected a folder of this user's with mode 0700")
    return folder


def hit(phase: str, *requests: str) -> None:
    """This process passes a point with these requests: does what was armed for it."""
    if _folder is None:
        return
    point = f"{_worker_id.partition('-')[0]}.{phase}"
    path = _folder / f"{point}.json"
    try:
        found = path.stat()
        armed = Arming(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return  # not armed, or another process was faster
    matching = [r for r in requests if r.startswith(armed.request)] if armed.request else list(requests)
    if (armed.request and not matching) or (armed.worker and armed.worker != _worker_id):
        return
    counted, num = _hits.get(point, (0, 0))
    num = num + 1 if counted == found.st_mtime_ns else 1
    _hits[point] = (found.st_mtime_ns, num)
    if num < armed.nth:
        return
    try:
        path.unlink()
    except FileNotFoundError:
        return  # another process took it
    _note(Fired(point, armed.action, _worker_id, os.getpid(), tuple(matching), time.monotonic()))
    _act(armed)


def _note(fired: Fired) -> None:
    assert _folder is not None
    line = json.dumps(asdict(fired)) + "\n"
    descriptor = os.open(_folder / _FIRED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _act(armed: Arming) -> None:
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "node":
            _kill_node()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(armed.seconds)
        case "error":
            raise FailpointHit(f"failpoint {armed.point}")


def _kill_node() -> None:
    """This process last: nobody else would finish the work."""
    me = psutil.Process()
    raylet = me.parent()
    if raylet is None or raylet.name() != "raylet":
        raise FailpointHit(f"the parent of process {me.pid} is no raylet but {raylet}")
    for process in [*raylet.children(recursive=True), raylet]:
        if process.pid != me.pid:
            process.kill()
    me.kill()


# --- in the process that tests --------------------------------------------------------------------------


class Failpoints:
    """Arms points of a cluster that runs with this folder, and reads what fired."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is not there. Start the cluster with `environment`."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = checked(folder)

    @property
    def environment(self) -> dict[str, str]:
        """What the cluster's processes must start with."""
        return {VARIABLE: str(self.folder)}

    def arm(self, point: str, **how: Any) -> None:
        """Arm a point, once; see `Arming`. A point that waits already is armed anew.

        Raises:
            ConfigError: there is no such point or action.
        """
        armed = Arming(point, **how)
        role, _, phase = point.partition(".")
        if phase not in POINTS.get(role, ()):
            known = ", ".join(f"{role}.{phase}" for role, phases in POINTS.items() for phase in phases)
            raise ConfigError(f"failpoint {point!r}: there are {known}")
        if armed.action not in Action.__args__ or armed.nth < 1:  # type: ignore[attr-defined]
            raise ConfigError(f"failpoint {point}: action={armed.action!r} nth={armed.nth}: not possible")
        partial = self.folder / f"{point}.partial"
        partial.write_text(json.dumps(asdict(armed)))
        partial.replace(self.folder / f"{point}.json")

    def disarm(self) -> list[str]:
        """Take back what has not fired; the points that had not."""
        left = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            left.append(path.stem)
        return left

    def fired(self) -> list[Fired]:
        """Everything that fired, oldest first."""
        try:
            lines = (self.folder / _FIRED).read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [Fired(**{**one, "requests": tuple(one["requests"])}) for one in found]
