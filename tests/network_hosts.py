"""Names -> hosts on this machine, each with an address, processes, /tmp/ray and an ssh server of its own.

A host is a network, process, mount and host-name namespace with sshd in it: the default commands of `ray up` run
`ray stop`, which ends every Ray that it can see. One more namespace holds the bridge between them; the launcher runs there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

NETWORK = "10.77.0"
_CONTROL, _CONTROL_PATHS = Path("/tmp"), "ray_ssh_*"
"""Where Ray's launcher keeps the sockets of its ssh connections; it leaves the folders."""
_START = r"""
hostname {name}
mount --make-rprivate /
mount --bind {folder}/passwd /etc/passwd
mkdir -p /tmp/ray /run/sshd
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
exec {sshd} -D -e -f {folder}/sshd_config
"""
_SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {root}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PrintMotd no
PidFile none
"""
_PROFILE = """
export PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_IGNORE_INSTALLED=1 OMP_NUM_THREADS=1
"""
"""The wheel is installed for real; what it needs is found in the environment that runs the tests."""


def why_not() -> str:
    """What this machine lacks for it; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [tool for tool in ("ip", "rsync", "unshare", "ssh-keygen", "ssh") if shutil.which(tool) is None]
    if not Path(_sshd()).exists():
        lacking.append("sshd")
    if lacking:
        return f"needs {', '.join(lacking)}: openssh-server, rsync and iproute2"
    name = f"pl{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are refused here"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def _sshd() -> str:
    return shutil.which("sshd") or "/usr/sbin/sshd"


class Hosts:
    """Addresses are NETWORK.10 and up, in the order of the names; the launcher is NETWORK.1."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self._mark = f"pl{secrets.token_hex(2)}"
        self.address = {name: f"{NETWORK}.{10 + at}" for at, name in enumerate(names)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._others = set(_CONTROL.glob(_CONTROL_PATHS))
        self._launcher_home = root / "launcher"
        self._launcher_home.mkdir()
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / "key"))
        self._bridge()
        for name in names:
            self._host(name)
        for name in names:
            self._await(name)

    def close(self) -> None:
        for process in self._processes:  # of each the whole process namespace ends with it
            process.kill()
            process.wait()
        for name in ("hub", *self.address):
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], check=False)
        for folder in set(_CONTROL.glob(_CONTROL_PATHS)) - self._others:
            shutil.rmtree(folder, ignore_errors=True)

    def home(self, name: str) -> Path:
        return self.root / name / "home"

    def launch(self, *command: str, limit_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command where the launcher is: it reaches all hosts, with a home of its own."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self._launcher_home),
            "RAY_TMPDIR": str(self._launcher_home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
        }
        return subprocess.run(
            ["ip", "netns", "exec", self._namespace("hub"), *command],
            env=environment,
            cwd=self._launcher_home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def on(self, name: str, command: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host, as `ray exec` would."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        ssh = ["ssh", "-i", str(self.root / "key"), *(part for o in options for part in ("-o", o))]
        script = f"bash --login -c 'source ~/.bashrc; {command}'"
        return self.launch(*ssh, f"root@{self.address[name]}", script, limit_s=limit_s)

    def commands(self, name: str) -> list[str]:
        """Of all processes on a host but its ssh server."""
        found = _run("ip", "netns", "pids", self._namespace(name)).split()
        lines = []
        for pid in found:
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it ended meanwhile
                continue
            if line and "sshd" not in line and not line.startswith("unshare "):
                lines.append(line)
        return lines

    def remains(self, name: str) -> list[str]:
        """What is left on a host besides its ssh server, what was installed and Ray's own folder of logs: processes,
        listeners, shared memory."""
        look = "ss --no-header --listening --tcp --unix --numeric | grep -v :22; find /dev/shm -mindepth 1"
        lines = self.on(name, look).stdout.splitlines()
        return [*self.commands(name), *(line for line in lines if line.strip())]

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _bridge(self) -> None:
        hub = self._namespace("hub")
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "set", "lo", "up")
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")

    def _host(self, name: str) -> None:
        here, hub = self._namespace(name), self._namespace("hub")
        port = f"p{list(self.address).index(name)}"
        _run("ip", "netns", "add", here)
        _run("ip", "-n", here, "link", "set", "lo", "up")
        _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", here)
        _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", here, "address", "add", f"{self.address[name]}/24", "dev", "eth0")
        _run("ip", "-n", here, "link", "set", "eth0", "up")
        folder, home = self.root / name, self.home(name)
        home.mkdir(parents=True)
        (folder / "passwd").write_text(
            f"root:x:0:0:root:{home}:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        )
        (home / ".bash_profile").write_text(_PROFILE)
        facts = {
            "name": name,
            "folder": folder,
            "root": self.root,
            "address": self.address[name],
            "sshd": _sshd(),
        }
        (folder / "sshd_config").write_text(_SSHD.format(**facts))
        (folder / "start.sh").write_text(_START.format(**facts))
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        _environment(home / ".paceline" / "venv")
        new = ["--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--mount-proc"]
        with (folder / "sshd.log").open("w") as log:
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", here, "unshare", *new, "bash", str(folder / "start.sh")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _await(self, name: str) -> None:
        end = time.monotonic() + 20
        while self.on(name, "true").returncode:
            assert time.monotonic() < end, (self.root / name / "sshd.log").read_text()
            time.sleep(0.2)


def _environment(folder: Path) -> None:
    """An environment with Ray and all that Paceline needs, but without Paceline: `ray up` installs its wheel."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # A plain line of a .pth: what lies there can be imported, but its own .pth files, ours among them, do nothing.
    site = folder / "lib" / version / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ray = folder / "bin" / "ray"
    ray.write_text(f"#!{folder}/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
