"""a key as a client sends it -> who it belongs to, if anybody; a file keeps hashes only.

A key holds 256 random bits, so one SHA-256 of it is enough: nothing shorter than guessing all of it helps whoever
reads the file, and a slow hash, which makes guessing weak passwords dear, would only make every request dear.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec
import structlog

from paceline.cluster.errors import ConfigError, Unavailable

log = structlog.get_logger(__name__)

_SHAPE = re.compile(r"pl_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NOBODY = hashlib.sha256(b"").hexdigest()
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,80}")


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


class _Content(msgspec.Struct):
    keys: list[Key]
    version: int = 1


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
        shape = _SHAPE.fullmatch(text)
        key = self._keys.get(shape[1]) if shape else None
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        is_equal = hmac.compare_digest(digest, _NOBODY if key is None else key.sha256)
        return key if key is not None and is_equal and key.revoked is None else None

    def read(self) -> list[Key]:
        """All keys, revoked ones too, in order of creation.

        Raises:
            ConfigError: the file is damaged or may not be read.
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_Content).keys
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"key file {self.path}: cannot be read: {error}") from error

    def create(self, name: str, *, tenant: str = "", capture: str = "never") -> tuple[Key, str]:
        """A new key and its text, which is kept nowhere.

        Raises:
            ConfigError: name or tenant is not one line of 1 to 80 characters, there is no such rule of capture, or the
                file cannot be read or written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"key name {name[:80]!r}: expected one line of 1 to 80 characters")
        if tenant and not _NAME.fullmatch(tenant):
            raise ConfigError(f"tenant {tenant[:80]!r}: expected one line of 1 to 80 characters")
        rule = _rule(capture)
        with self._locked():
            id = secrets.token_hex(6)
            text = f"pl_{id}_{secrets.token_urlsafe(32)}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            key = Key(id, name, digest, _now(), tenant=tenant, capture=rule)
            self._write([*self.read(), key])
        return key, text

    def consent(self, id: str, capture: str) -> Key:
        """Change what of a key's requests may be kept from now on; what was kept is deleted by its tenant.

        Raises:
            ConfigError: there is no such key or rule, or the file cannot be read or written.
        """
        rule = _rule(capture)
        return self._change(id, lambda key: msgspec.structs.replace(key, capture=rule))

    def revoke(self, id: str) -> Key:
        """Make a key invalid; it stays in the list. Revoking it again changes nothing.

        Raises:
            ConfigError: there is no key with this id, or the file cannot be read or written.
        """
        return self._change(
            id, lambda key: key if key.revoked else msgspec.structs.replace(key, revoked=_now())
        )

    def _change(self, id: str, change: Callable[[Key], Key]) -> Key:
        with self._locked():
            keys = self.read()
            found = next((key for key in keys if key.id == id), None)
            if found is None:
                raise ConfigError(
                    f"key id {id[:80]!r}: no such key in {self.path}; `paceline keys list` shows them"
                )
            changed = change(found)
            if changed != found:
                self._write([changed if key is found else key for key in keys])
            return changed

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < self._recheck_s:
            return
        self._checked = now
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            stamp = None
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
            raise ConfigError(f"key file {self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, keys: list[Key]) -> None:
        """Replace the file in one go: a reader sees the old or the new one."""
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(_Content(keys))) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"key file {self.path}: cannot be written: {error.strerror}") from error


def needs_keys(auth: str, host: str) -> bool:
    """Whether a gateway with these two fields of its configuration lets in nobody without a key."""
    return auth == "keys" or (auth == "auto" and not is_loopback(host))


def check_guarded(auth: str, host: str, store: KeyFile) -> None:
    """A listener that others can reach starts without keys only where its configuration says so.

    Raises:
        ConfigError: it says nothing, and there is no valid key.
    """
    if auth == "auto" and needs_keys(auth, host) and all(key.revoked for key in store.read()):
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


def _rule(text: str) -> CaptureRule:
    for rule in CAPTURE_RULES:
        if text == rule:
            return rule
    raise ConfigError(f"capture={text[:80]!r}: expected one of {', '.join(CAPTURE_RULES)}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
