"""a key as a client sends it -> who it belongs to, if anybody; a file keeps hashes only, and who changed what.

A key holds 256 random bits, so one SHA-256 of it is enough: nothing shorter than guessing all of it helps whoever
reads the file, and a slow hash, which makes guessing weak passwords dear, would only make every request dear.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

import msgspec
import structlog

from paceline.cluster.errors import ConfigError, Unavailable
from paceline.cluster.rates import Limits

log = structlog.get_logger(__name__)

_SHAPE = re.compile(r"pl_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NOBODY = hashlib.sha256(b"").hexdigest()
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,80}")
_KEPT_CHANGES = 1000
MAX_LIMIT = 1_000_000_000

Scope = Literal["user", "admin"]
"""What a key opens. user: the API at gateways. admin: Control, its page and its API. Neither opens the other's door: a key
in an application's environment can change nothing, and an operator's does not belong there."""
SCOPES: tuple[Scope, ...] = get_args(Scope)

T = TypeVar("T")

CaptureRule = Literal["never", "asked", "default"]
"""What of a tenant's requests may be kept for training, if the operator keeps any. never: none. asked: those with
`"store": true`. default: those without `"store": false`."""
CAPTURE_RULES: tuple[CaptureRule, ...] = get_args(CaptureRule)


class Key(msgspec.Struct, frozen=True):
    """What is kept of a key. The id is part of its text, and all of it that may stand in a log."""

    id: str
    name: str
    sha256: str
    """Of the whole key, in hex."""
    created: str
    revoked: str | None = None
    """When, in ISO 8601 and UTC, as `created`."""
    tenant: str = ""
    """Whose requests those with this key are: what is kept can be deleted by it, and drafts can be routed by it."""
    capture: CaptureRule = "never"
    """The tenant's consent."""
    scope: Scope = "user"
    limits: Limits = Limits()
    """0 is the configuration's default, `limits.requests_per_minute` and its neighbours."""

    @property
    def owner(self) -> str:
        """The tenant; a key that was made without one is a tenant of its name."""
        return self.tenant or self.name


class KeyStore(Protocol):
    """Where a gateway looks keys up."""

    def find(self, text: str) -> Key | None:
        """The valid key with this text; None if it is unknown or revoked.

        Raises:
            Unavailable: the store cannot be read. Nobody is let in then.
        """
        ...


class KeyChange(msgspec.Struct, frozen=True):
    """Somebody changed something: a row of the audit trail that the file carries until Control has read it."""

    number: int
    """From 1, in the order of the file's changes."""
    time: float
    """Unix seconds."""
    actor: str
    """An operator of Control, or cli:USER."""
    action: Literal["key_create", "key_revoke", "key_change"]
    id: str
    """The key's."""
    detail: dict[str, str]
    address: str = ""


class KeyFileError(ConfigError):
    """The key file is damaged, or may not be read or written."""


class KeyContent(msgspec.Struct):
    """What a key file holds."""

    keys: list[Key]
    version: int = 1
    changes: list[KeyChange] = []
    """The latest 1000."""


@dataclass(frozen=True)
class Editor:
    """Who changes keys, for the audit trail."""

    actor: str
    address: str = ""


class KeyFile:
    """A KeyStore in one JSON file, readable by its owner only. Safe for several writers and any number of readers."""

    def __init__(self, path: Path, *, recheck_s: float = 0.5) -> None:
        """`recheck_s`: how old may be what `find` knows of the file."""
        self.path = path
        self._recheck_s = recheck_s
        self._checked = float("-inf")
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str, Key] = {}
        self._is_broken = False

    def find(self, text: str) -> Key | None:
        """See `KeyStore.find`. Takes the same time wherever a wrong key differs from a right one."""
        self._refresh()
        if self._is_broken:
            raise Unavailable("API keys cannot be checked")
        key = self._keys.get(key_id(text))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        is_equal = hmac.compare_digest(digest, _NOBODY if key is None else key.sha256)
        return key if key is not None and is_equal and key.revoked is None else None

    def has_admin(self) -> bool:
        """Whether a valid key in it opens Control."""
        self._refresh()
        return any(key.scope == "admin" and key.revoked is None for key in self._keys.values())

    def is_revoked(self, id: str) -> bool:
        """Whether the file, as `find` last saw it, says that this key is revoked."""
        key = self._keys.get(id)
        return key is not None and key.revoked is not None

    def stamp(self) -> tuple[int, int, int] | None:
        """Another one after each change; None where there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def read(self) -> list[Key]:
        """All keys, revoked ones too, in order of creation. See `content`."""
        return self.content().keys

    def content(self) -> KeyContent:
        """All of it.

        Raises:
            ConfigError: the file is damaged or may not be read.
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=KeyContent)
        except FileNotFoundError:
            return KeyContent([])
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise KeyFileError(f"key file {self.path}: cannot be read: {error}") from error

    def create(
        self,
        name: str,
        *,
        tenant: str = "",
        capture: str = "never",
        scope: str = "user",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        by: Editor | None = None,
    ) -> tuple[Key, str]:
        """A new key and its text, which is kept nowhere.

        Raises:
            ConfigError: name or tenant is not one line of 1 to 80 characters, there is no such scope or rule of capture,
                a limit is out of range, or the file cannot be read or written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"key name {name[:80]!r}: expected one line of 1 to 80 characters")
        if tenant and not _NAME.fullmatch(tenant):
            raise ConfigError(f"tenant {tenant[:80]!r}: expected one line of 1 to 80 characters")
        rule = _one_of("capture", capture, CAPTURE_RULES)
        opens = _one_of("scope", scope, SCOPES)
        _check_limits(limits)
        with self._locked():
            id = secrets.token_hex(6)
            text = f"pl_{id}_{secrets.token_urlsafe(32)}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            key = Key(id, name, digest, _now(), None, tenant, rule, opens, limits)
            content = self.content()
            detail = {"name": name, "tenant": key.owner, "scope": opens, "capture": rule, **_told(limits)}
            self._write([*content.keys, key], content.changes, "key_create", id, detail, by)
        return key, text

    def change(
        self, id: str, *, capture: str | None = None, limits: Limits | None = None, by: Editor | None = None
    ) -> Key:
        """Change what of a key's requests may be kept from now on, or its limits; None leaves them as they are.

        What was kept is deleted by its tenant.

        Raises:
            ConfigError: there is no such key or rule, a limit is out of range, or the file cannot be read or written.
        """
        changes: dict[str, object] = {}
        if capture is not None:
            changes["capture"] = _one_of("capture", capture, CAPTURE_RULES)
        if limits is not None:
            _check_limits(limits)
            changes["limits"] = limits
        detail = {"capture": capture or "", **(_told(limits) if limits is not None else {})}
        return self._change(id, lambda key: msgspec.structs.replace(key, **changes), "key_change", detail, by)

    def revoke(self, id: str, *, by: Editor | None = None) -> Key:
        """Make a key invalid; it stays in the list. Revoking it again changes nothing.

        Raises:
            ConfigError: there is no key with this id, or the file cannot be read or written.
        """
        return self._change(
            id,
            lambda key: key if key.revoked else msgspec.structs.replace(key, revoked=_now()),
            "key_revoke",
            {},
            by,
        )

    def _change(
        self,
        id: str,
        change: Callable[[Key], Key],
        action: Literal["key_revoke", "key_change"],
        detail: dict[str, str],
        by: Editor | None,
    ) -> Key:
        with self._locked():
            content = self.content()
            keys = content.keys
            found = next((key for key in keys if key.id == id), None)
            if found is None:
                raise ConfigError(
                    f"key id {id[:80]!r}: no such key in {self.path}; `paceline keys list` shows them"
                )
            changed = change(found)
            if changed != found:
                kept = [changed if key is found else key for key in keys]
                self._write(kept, content.changes, action, id, {"name": found.name, **detail}, by)
            return changed

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < self._recheck_s:
            return
        self._checked = now
        stamp = self.stamp()
        if stamp == self._stamp and not self._is_broken:
            return
        try:
            self._keys = {key.id: key for key in self.read()}
            self._is_broken = False
        except ConfigError as error:
            if not self._is_broken:
                log.error("key_file_unreadable", error=str(error))
            self._is_broken = True
        self._stamp = stamp

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, in whichever process."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(f"{self.path}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise KeyFileError(f"key file {self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(
        self,
        keys: list[Key],
        changes: list[KeyChange],
        action: Literal["key_create", "key_revoke", "key_change"],
        id: str,
        detail: dict[str, str],
        by: Editor | None,
    ) -> None:
        """Replace the file in one go: a reader sees the old or the new one, each with its history."""
        editor = by or Editor(f"cli:{_user()}")
        number = changes[-1].number + 1 if changes else 1
        told = {name: value for name, value in detail.items() if value}
        change = KeyChange(number, time.time(), editor.actor, action, id, told, editor.address)
        content = KeyContent(keys, changes=[*changes, change][-_KEPT_CHANGES:])
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise KeyFileError(f"key file {self.path}: cannot be written: {error.strerror}") from error


def key_file_path(keys_file: str, home: Path) -> Path:
    """`gateway.keys_file` -> the file on this machine.

    Raises:
        ConfigError: it is a relative path.
    """
    if keys_file == "auto":
        return home / "keys.json"
    path = Path(keys_file)
    if not path.is_absolute():  # each process of a cluster has its own working directory
        raise ConfigError(f"gateway.keys_file={keys_file!r}: expected an absolute path, or auto")
    return path


def key_id(text: str) -> str:
    """The id in a key's text; "" if it has no key's shape."""
    shape = _SHAPE.fullmatch(text)
    return shape[1] if shape else ""


def needs_keys(auth: str, host: str) -> bool:
    """Whether a gateway with these two fields of its configuration lets in nobody without a key."""
    return auth == "keys" or (auth == "auto" and not is_loopback(host))


def check_guarded(auth: str, host: str, store: KeyFile) -> None:
    """A listener that others can reach starts without keys only where its configuration says so.

    Raises:
        ConfigError: it says nothing, and there is no valid key.
    """
    is_open = auth == "auto" and needs_keys(auth, host)
    if is_open and all(key.revoked or key.scope != "user" for key in store.read()):
        raise ConfigError(
            f"gateway.host={host}: others can reach this address and there is no API key in {store.path}; make one with "
            f"`paceline keys create NAME`, or set gateway.auth=keys to start without any, or gateway.auth=none to serve everybody"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False  # a name: who knows what it stands for
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _one_of(field: str, text: str, known: tuple[T, ...]) -> T:
    for one in known:
        if text == one:
            return one
    raise ConfigError(f"{field}={text[:80]!r}: expected one of {', '.join(map(str, known))}")


def _check_limits(limits: Limits) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        if not 0 <= value <= MAX_LIMIT:
            raise ConfigError(f"{name}={value}: expected 0..{MAX_LIMIT}, 0 for the configuration's default")


def _told(limits: Limits) -> dict[str, str]:
    """For the audit trail."""
    return {name: str(value) for name, value in msgspec.structs.asdict(limits).items() if value}


def _user() -> str:
    """Who runs this process; a container may have users without names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
