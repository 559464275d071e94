"""A test -> the URL of an empty database: a SQLite file, or one in a PostgreSQL server that these tests start."""

from __future__ import annotations

import getpass
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from paceline.cluster.registry.registry import Registry

DATABASES = ("sqlite", "postgresql")
_names = itertools.count()


def programs() -> Path | None:
    """Where the server's programs are; Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    candidates = [Path(found).resolve().parent] if found else []
    return next((folder for folder in [*candidates, *folders] if (folder / "postgres").exists()), None)


class Server:
    """A PostgreSQL server of our own: own folder, a socket in it and no port, run by somebody who is not root."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-pg-"))
        self._user = self._unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        data = str(self.folder / "data")
        arguments = [
            str(binaries / "initdb"),
            "-D",
            data,
            "-U",
            "paceline",
            "-E",
            "UTF8",
            "--locale=C",
            "-A",
            "trust",
        ]
        done = subprocess.run([*arguments, "--no-sync"], **self._as_user(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    def _unprivileged(self) -> str:
        if os.geteuid() != 0:
            return getpass.getuser()
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = "postgres" if "postgres" in names else "nobody"
        shutil.chown(self.folder, user)
        return user

    def _as_user(self) -> dict:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return {"cwd": self.folder}
        group = pwd.getpwnam(self._user).pw_gid
        return {"cwd": self.folder, "user": self._user, "group": group, "extra_groups": []}

    def start(self) -> None:
        options = [
            "listen_addresses=",
            f"unix_socket_directories={self.folder}",
            "fsync=off",
            "max_connections=40",
        ]
        command = [str(self._binaries / "postgres"), "-D", str(self.folder / "data")]
        for option in options:
            command += ["-c", option]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, **self._as_user(), stdout=log, stderr=log)
        for _ in range(200):
            try:
                psycopg.connect(self.address("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def kill(self) -> None:
        """At once, as a crash would: connections break and the next start recovers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(timeout=20)

    def freeze(self) -> list[int]:
        """Stop all its processes without ending them: they hold their connections and say nothing."""
        import psutil

        assert self._process is not None
        root = psutil.Process(self._process.pid)
        family = [root, *root.children(recursive=True)]
        for process in family:
            process.suspend()
        return [process.pid for process in family]

    def thaw(self, pids: list[int]) -> None:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)

    def address(self, name: str) -> str:
        return f"postgresql://paceline@/{name}?host={self.folder}"

    def create(self) -> str:
        """An empty database; -> its URL."""
        name = f"test_{next(_names)}"
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.address(name)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)


def make_server() -> Server:
    binaries = programs()
    if binaries is None:
        pytest.skip(
            "PostgreSQL NOT TESTED: no server here; apt-get install -y --no-install-recommends postgresql"
        )
    return Server(binaries)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    server = make_server()
    server.start()
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may kill."""
    server = make_server()
    server.start()
    yield server
    server.close()


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.db"
    return request.getfixturevalue("shared_server").create()


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def open_registry(url: str, tmp_path: Path) -> Iterator[Callable[[], Registry]]:
    """Open the test's database, as often as wanted."""
    opened: list[Registry] = []

    def open_one() -> Registry:
        opened.append(Registry.open(url, tmp_path, clock=Clock()))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.check_integrity()
        registry.close()


@pytest.fixture
def registry(open_registry: Callable[[], Registry]) -> Registry:
    return open_registry()
