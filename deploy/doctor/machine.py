"""This machine and a configuration -> whether one suits the other: software, cores, memory, ports, files, keys, clock."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import httpx
import psutil

from paceline.cluster.admin.key import read_admin_key
from paceline.cluster.config import ClusterConfig, EngineConfig, model_folder
from paceline.cluster.errors import ConfigError, PacelineError
from paceline.cluster.keys import KeyFile, check_guarded, is_loopback, key_file_path, needs_keys
from paceline.cluster.learning.storage import home as learning_home
from paceline.cluster.model_files import check_model_files, weight_files
from paceline.cluster.pair import check_pair
from paceline.deploy import local
from paceline.deploy.doctor.findings import Check, Finding, fail, ok, skip, warn
from paceline.deploy.placement import link_address, local_addresses
from paceline.deploy.ray_deploy import ray_token

_GB = 1 << 30
_PROCESS_BYTES = 450 << 20
"""Of a process with torch and transformers, without its weights and KV: 455 MB after its imports, where measured."""
_SMALL_PROCESS_BYTES = 150 << 20
"""Of one without torch: 149 MB."""
_RAY_BYTES = 800 << 20
"""Its own processes and the object store of a local cluster."""
_OBJECT_STORE_BYTES = 100 << 20
_STA_UNSYNC = 0x40


@dataclass(frozen=True)
class Machine:
    """What the checks look at. `is_running`: a cluster with this configuration runs here, and holds ports and memory."""

    config: ClusterConfig
    is_running: bool = False

    def checks(self) -> list[Check]:
        """In the order in which one would mend things."""
        return [
            ("Python", python),
            ("packages", packages),
            ("torch", self.torch),
            ("cores", self.cores),
            ("memory", self.memory),
            ("/dev/shm", self.shared_memory),
            ("open files", open_files),
            ("temporary files", temporary_files),
            ("models", self.models),
            ("ports", self.ports),
            ("link.interface", self.interface),
            ("keys", self.keys),
            ("Ray's token", ray_is_closed),
            ("clock", clock),
            ("registry", self.registry),
            ("capture's storage", self.storage),
        ]

    @property
    def _engines(self) -> list[tuple[str, EngineConfig]]:
        config = self.config
        found: list[tuple[str, EngineConfig]] = [
            ("prefill", config.prefill),
            ("decode", config.decode),
            ("draft", config.draft),
        ]
        return [*found, ("trainer", config.trainer)] if config.has_trainer else found

    # -- software ----------------------------------------------------------------------------------------

    def torch(self) -> Finding:
        """Its build suits what the configuration computes on."""
        import torch

        wants_gpu = any(engine.num_gpus > 0 and engine.replicas for _, engine in self._engines)
        build = f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__
        has_driver = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
        cuda = "install PyTorch's build for CUDA"
        if wants_gpu and not torch.cuda.is_available():
            found = f"{build}: no GPU can be used, and the configuration asks for some (num_gpus)"
            return fail(
                "torch",
                found,
                cuda if torch.version.cuda is None else "look at `nvidia-smi`: driver and device",
            )
        if has_driver and torch.version.cuda is None:
            return warn("torch", f"{build}, on a machine with a GPU", cuda)
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return fail(
                "torch",
                f"{build} without oneDNN, on which steps on CPU are built",
                "install PyTorch's own wheel",
            )
        return ok("torch", f"{build}, {torch.backends.cpu.get_cpu_capability()}")

    # -- machine -----------------------------------------------------------------------------------------

    def cores(self) -> Finding:
        """No worker has more threads than cores, and a container's quota is no smaller than it looks."""
        num, quota = usable_cores()
        widest = max(
            ((engine.threads, role) for role, engine in self._engines if engine.replicas), default=(1, "")
        )
        wanted = sum(engine.threads * engine.replicas * local.ranks(engine) for _, engine in self._engines)
        found = f"{num} usable{f', of which a quota leaves {quota:g}' if quota else ''}; {wanted} threads of engines"
        if widest[0] > num:
            return fail(
                "cores",
                f"{found}; {widest[1]}.threads={widest[0]}",
                f"--set {widest[1]}.threads={num}, or fewer",
            )
        if quota and quota < widest[0]:
            advice = "a throttled process stands still for tens of milliseconds: raise the limit, or lower the threads"
            return warn("cores", found, advice)
        return ok("cores", found)

    def memory(self) -> Finding:
        """There is room for weights, KV and processes of a cluster on one machine."""
        free = available_memory()
        if self.is_running:
            return ok("memory", f"{free / _GB:.1f} GB free beside the cluster that runs")
        try:
            needed = self._needed_bytes()
        except PacelineError:
            return skip(
                "memory", f"{free / _GB:.1f} GB free; how much is needed cannot be said without the models"
            )
        found = f"{free / _GB:.1f} GB free, about {needed / _GB:.1f} needed for all roles on one machine"
        if needed > free:
            return fail("memory", found, "fewer replicas, smaller kv_memory_mb, or model.int8_weights on CPU")
        return warn("memory", found, "it will be tight") if needed > 0.85 * free else ok("memory", found)

    def _needed_bytes(self) -> int:
        config, total = self.config, _RAY_BYTES + 3 * _SMALL_PROCESS_BYTES
        for role, engine in self._engines:
            ranks = engine.replicas * local.ranks(engine)
            name = config.model.draft if role in ("draft", "trainer") else config.model.target
            weights = sum(file.stat().st_size for file in weight_files(model_folder(name)))
            on_gpu = engine.num_gpus > 0
            total += ranks * _PROCESS_BYTES
            if not on_gpu:  # float32 on CPU, whatever the file has: at most twice its size
                total += engine.replicas * 2 * weights + ranks * (engine.kv_memory_mb << 20)
        return total

    def shared_memory(self) -> Finding:
        path = Path("/dev/shm")
        if not path.is_dir():
            return warn("/dev/shm", "there is none", "mount a tmpfs there: Ray keeps its objects in it")
        free = shutil.disk_usage(path).free
        found = f"{free / _GB:.2f} GB free"
        advice = "docker run --shm-size=2g; in a pod an emptyDir with medium Memory"
        if self.config.link.backend == "shm" and free < _GB:
            return fail("/dev/shm", f"{found}, and link.backend=shm sends KV through it", advice)
        if free < _OBJECT_STORE_BYTES and not self.is_running:
            return warn("/dev/shm", f"{found}: Ray will use the disk instead", advice)
        return ok("/dev/shm", found)

    # -- files -------------------------------------------------------------------------------------------

    def models(self) -> Iterator[Finding]:
        """Both are whole, and speak of the same tokens."""
        model, speculation = self.config.model, self.config.speculation
        target = model_folder(model.target)
        check_model_files(target)
        yield ok("model.target", str(target))
        if speculation.enabled and self.config.draft.replicas and "draft" in speculation.sources:
            draft = model_folder(model.draft)
            check_model_files(draft)
            check_pair(target, draft)
            yield ok("model.draft", f"{draft}, with the target's tokenizer")

    def registry(self) -> Finding:
        """The database of versions and runs answers."""
        if not self.config.learning.enabled:
            return skip("registry", "learning.enabled=false")
        import sqlalchemy as sa

        from paceline.cluster.registry.database import Database, resolve_url

        url = resolve_url(self.config.learning.registry, learning_home())
        if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
            return self._can_be_made("registry", Path(url.database or ""))
        database = Database(url)
        began = time.monotonic()
        with database.reading() as connection:
            connection.execute(sa.text("select 1"))
        return ok("registry", f"{database.shown} answers in {1e3 * (time.monotonic() - began):.0f} ms")

    @staticmethod
    def _can_be_made(check: str, path: Path) -> Finding:
        """Nothing is there yet: could it be?"""
        folder = next(parent for parent in path.parents if parent.exists())
        if os.access(folder, os.W_OK):
            return ok(check, f"{path} will be made")
        return fail(
            check, f"{path} is not there, and {folder} cannot be written", "another path, or its permissions"
        )

    def storage(self) -> Finding:
        """Shards can be written, and there is room for as many as will be kept."""
        learning = self.config.learning
        if not learning.enabled:
            return skip("capture's storage", "learning.enabled=false")
        from paceline.cluster.learning.storage import learning_folder, remove, write_whole

        fs, root = learning_folder(learning)
        probe = f"{root}/.doctor-{os.getpid()}"
        write_whole(fs, probe, b"paceline doctor")
        remove(fs, probe)
        if "://" in learning.storage:
            return ok("capture's storage", f"{learning.storage} can be written")
        free = shutil.disk_usage(root).free
        found = f"{root}: {free / _GB:.1f} GB free, learning.capture.max_mb={learning.capture.max_mb}"
        if free < (learning.capture.max_mb << 20):
            return warn("capture's storage", found, "lower learning.capture.max_mb, or make room")
        return ok("capture's storage", found)

    # -- network and keys --------------------------------------------------------------------------------

    def ports(self) -> Iterator[Finding]:
        for name, section in (("gateway", self.config.gateway), ("control", self.config.control)):
            check = f"{name}.port"
            if self.is_running:
                yield ok(check, f"{section.host}:{section.port} is the running cluster's")
            elif section.port == 0:
                yield ok(check, "a free one is taken")
            else:
                yield self._port(check, name, section.host, section.port)

    @staticmethod
    def _port(check: str, name: str, host: str, port: int) -> Finding:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                advice = f"--set {name}.port=0 takes a free one; `ss -ltnp` says who has it"
                if error.errno not in (98, 13):
                    advice = f"--set {name}.host=ADDRESS with one of this machine's: {', '.join(local_addresses())}"
                return fail(check, f"{host}:{port}: {error.strerror}", advice)
        return ok(check, f"{host}:{port} is free")

    def interface(self) -> Finding:
        """All sockets between workers can bind to it."""
        interface, found = self.config.link.interface, local_addresses()
        if interface == "node":
            return ok("link.interface", "node: the address by which Ray knows each node")
        address = link_address(interface, "", found)
        if address not in found:
            return fail(
                "link.interface", f"{address} is no address of this machine", f"one of {', '.join(found)}"
            )
        return ok("link.interface", address)

    def keys(self) -> Iterator[Finding]:
        gateway, control = self.config.gateway, self.config.control
        store = KeyFile(key_file_path(gateway.keys_file, local.home()))
        check_guarded(
            gateway.auth, gateway.host, store
        )  # raises where others could use the gateway without a key
        are_asked_for = needs_keys(gateway.auth, gateway.host)
        yield ok("API keys", "asked for" if are_asked_for else "off: only this machine reaches the gateway")
        if read_admin_key(local.admin_key_path()) is not None:
            yield ok("admin key", "is there, and its owner's only")
        elif is_loopback(control.host):
            yield ok("admin key", "`paceline serve` will make one")
        else:
            advice = "set PACELINE_ADMIN_KEY, or let `paceline deploy` make it"
            yield warn("admin key", f"there is none in {local.admin_key_path()}", advice)


# --- what does not depend on the configuration ----------------------------------------------------------


def python() -> Finding:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    return ok("Python", found) if sys.version_info >= (3, 11) else fail("Python", found, "3.11 or newer")


def packages() -> Iterator[Finding]:
    """Everything that Paceline asks for is there, in a version that it was made for."""
    from packaging.requirements import Requirement

    wrong, num = [], 0
    for line in requires("paceline") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        num += 1
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} {found} is not {wanted.specifier}")
    if wrong:
        advice = f"pip install --force-reinstall 'paceline=={version('paceline')}'"
        yield fail("packages", "; ".join(wrong), advice)
    else:
        yield ok("packages", f"paceline {version('paceline')}; all {num} it asks for, in its ranges")
    yield ok("Ray", version("ray"))


def usable_cores() -> tuple[int, float | None]:
    """Cores this process may run on, and the quota of its control group, if that is less."""
    num = len(os.sched_getaffinity(0))
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        quota = None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        quota = None
    return num, quota if quota is not None and quota < num else None


def available_memory() -> int:
    """Bytes that this process's control group still leaves, or the machine."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # What it keeps of files is given back when wanted.
        cached = re.search(
            r"^inactive_file (\d+)$", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE
        )
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used + (int(cached[1]) if cached else 0))


def open_files() -> Finding:
    """Each client and each worker is one, and Ray wants many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return warn("open files", f"at most {soft}", "ulimit -n 65536, or LimitNOFILE= in the unit file")
    return ok("open files", f"at most {soft}")


def temporary_files() -> Finding:
    """Ray lives in /tmp, and stops taking work when the disk is 95 % full."""
    usage = shutil.disk_usage("/tmp")
    share = 1 - usage.free / usage.total
    found = f"/tmp is {share:.0%} full, {usage.free / _GB:.1f} GB free"
    if share >= 0.95:
        return fail(
            "temporary files",
            f"{found}: Ray refuses to work from 95 % on",
            "make room, or mount another /tmp",
        )
    return warn("temporary files", found, "make room") if share >= 0.9 else ok("temporary files", found)


def ray_is_closed(url: str = "http://127.0.0.1:8265") -> Finding:
    """A Ray whose dashboard answers anybody runs anybody's code."""
    check = "Ray's token"
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        found = "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports runs code here"
        return fail(check, found, "unset RAY_AUTH_MODE, or set it to token")
    try:
        token = ray_token()
    except ConfigError as error:
        return fail(check, str(error), "as it says")
    try:
        status = httpx.get(f"{url}/api/version", timeout=2.0, trust_env=False).status_code
    except httpx.HTTPError:
        kept = (
            "a token is kept here"
            if token
            else "none is kept here; `paceline serve` makes one for each cluster"
        )
        return ok(check, f"{kept}; no Ray dashboard at {url}")
    if status == 200:
        found = f"Ray's dashboard at {url} answers without one: whoever reaches it runs code there"
        return fail(check, found, "restart that Ray with RAY_AUTH_MODE=token")
    return ok(check, f"Ray's dashboard at {url} asks for it ({status})")


def clock() -> Finding:
    """Certificates, tokens' ages and what is deleted after so many hours go by it."""
    state = _clock_status()
    if state is None:
        return skip("clock", "the kernel does not say here whether it is kept")
    if state & _STA_UNSYNC:
        advice = "run chrony or systemd-timesyncd; in a container it is the host's"
        return warn("clock", "nobody keeps it (NTP)", advice)
    return ok("clock", "kept by NTP")


def _clock_status() -> int | None:
    """The status word of adjtimex(2), asked for without changing anything."""

    class Timex(ctypes.Structure):
        _fields_ = [
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_char * 256),
        ]

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        found = Timex()
        return None if libc.adjtimex(ctypes.byref(found)) < 0 else int(found.status)
    except (OSError, AttributeError):
        return None
