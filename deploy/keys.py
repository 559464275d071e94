"""PACELINE_HOME, a path or Control's address -> API keys, and the commands that create, list, change and revoke them.

On Control's machine commands write to the key file themselves, also while nothing runs; with --url they ask Control, from
anywhere. Either way each change is in the audit trail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cluster.admin.key import VARIABLE
from paceline.cluster.config import GatewayConfig
from paceline.cluster.errors import ConfigError
from paceline.cluster.keys import Key, KeyFile, check_guarded, key_file_path
from paceline.cluster.rates import Limits
from paceline.deploy import drafts, local

commands = typer.Typer(
    no_args_is_help=True,
    help="API keys: who may use gateways or Control, and how much. Running gateways notice changes within two seconds.",
)
out = Console(highlight=False)

File = Annotated[
    Path | None, typer.Option(help="The gateway's gateway.keys_file; keys.json in PACELINE_HOME by default.")
]
Url = Annotated[
    str, typer.Option(help="Ask Control at this address instead of writing to a file, http://HOST:8001.")
]
AdminKey = Annotated[
    str,
    typer.Option(
        "--key",
        help=f"With --url: the admin key; by default that of {VARIABLE}, else of admin.key in PACELINE_HOME.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Capture = Annotated[
    str,
    typer.Option(
        help="What of its requests may be kept for training: never; asked (those with store=true); "
        "or default (those without store=false). Nothing is where learning.enabled is off."
    ),
]
Amount = Annotated[int | None, typer.Option(help="0 is the configuration's `limits`.")]
Id = Annotated[str, typer.Argument(help="As `list` shows it.")]
Row = Mapping[str, Any]
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")


def key_file(path: Path | None) -> KeyFile:
    """The store at this path, or the default one."""
    return KeyFile(path or local.home() / "keys.json")


def check_gateway(gateway: GatewayConfig) -> None:
    """
    Raises:
        ConfigError: others can reach it, and nothing says that this was meant; or the path of its keys is a relative one.
    """
    check_guarded(gateway.auth, gateway.host, KeyFile(key_file_path(gateway.keys_file, local.home())))


class Keys(Protocol):
    """Where keys are. A row is what programs see of a key."""

    @property
    def place(self) -> str: ...
    def all(self) -> list[Row]: ...
    def create(
        self, name: str, *, tenant: str, capture: str, scope: str, limits: Limits
    ) -> tuple[Row, str]: ...
    def change(self, id: str, *, capture: str | None, limits: Mapping[str, int]) -> Row: ...
    def revoke(self, id: str) -> Row: ...


class FileKeys:
    """In a file of this machine."""

    def __init__(self, store: KeyFile) -> None:
        self._store = store
        self.place = str(store.path)

    def all(self) -> list[Row]:
        return [_row(key) for key in self._store.read()]

    def create(self, name: str, *, tenant: str, capture: str, scope: str, limits: Limits) -> tuple[Row, str]:
        key, text = self._store.create(name, tenant=tenant, capture=capture, scope=scope, limits=limits)
        return _row(key), text

    def change(self, id: str, *, capture: str | None, limits: Mapping[str, int]) -> Row:
        found = next((key for key in self._store.read() if key.id == id), None)
        new = msgspec.structs.replace(found.limits, **limits) if found is not None and limits else None
        return _row(self._store.change(id, capture=capture, limits=new))

    def revoke(self, id: str) -> Row:
        return _row(self._store.revoke(id))


@dataclass(frozen=True)
class ControlKeys:
    """At a running Control."""

    api: drafts.Api

    @property
    def place(self) -> str:
        return self.api.url

    def all(self) -> list[Row]:
        return [_from_answer(key) for key in reversed(self.api.get("keys")["keys"])]

    def create(self, name: str, *, tenant: str, capture: str, scope: str, limits: Limits) -> tuple[Row, str]:
        body = {"name": name, "tenant": tenant, "capture": capture, "scope": scope}
        made = self.api.send("POST", "keys", json={**body, **msgspec.structs.asdict(limits)})
        return _from_answer(made["key"]), made["secret"]

    def change(self, id: str, *, capture: str | None, limits: Mapping[str, int]) -> Row:
        body = {**limits, **({"capture": capture} if capture is not None else {})}
        return _from_answer(self.api.send("PATCH", f"keys/{_checked(id)}", json=body))

    def revoke(self, id: str) -> Row:
        return _from_answer(self.api.send("DELETE", f"keys/{_checked(id)}"))


def keys_at(file: Path | None, url: str, key: str) -> Keys:
    """Where the options say.

    Raises:
        ConfigError: they say two places, or there is no admin key.
    """
    if not url:
        return FileKeys(key_file(file))
    if file is not None:
        raise ConfigError("--file and --url: give one of them")
    return ControlKeys(drafts.api_for(url, "local", key))


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, or what for.")],
    tenant: Annotated[
        str, typer.Option(help="Whose requests those with it are; the name, if left out.")
    ] = "",
    scope: Annotated[
        str, typer.Option(help="user: opens the API at gateways. admin: opens Control, its page and its API.")
    ] = "user",
    capture: Capture = "never",
    requests_per_minute: Amount = 0,
    tokens_per_minute: Amount = 0,
    concurrency: Amount = 0,
    file: File = None,
    url: Url = "",
    key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, once: only its hash is kept."""
    keys = keys_at(file, url, key)
    limits = Limits(requests_per_minute or 0, tokens_per_minute or 0, concurrency or 0)
    row, text = keys.create(name, tenant=tenant, capture=capture, scope=scope, limits=limits)
    if as_json:
        print(json.dumps({**row, "key": text}))
        return
    out.print(text, markup=False, soft_wrap=True)
    out.print(
        f"id {row['id']} in {keys.place}; the key itself is not kept, so note it now",
        markup=False,
        soft_wrap=True,
    )


@commands.command("list")
def show(file: File = None, url: Url = "", key: AdminKey = "", as_json: AsJson = False) -> None:
    """Show every key by id and name."""
    keys = keys_at(file, url, key)
    rows = keys.all()
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        out.print(
            f"no API keys in {keys.place}; `paceline keys create NAME` makes one",
            markup=False,
            soft_wrap=True,
        )
        return
    table = Table(title=keys.place, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "name", "tenant", "scope", "capture", "limits", "created", "revoked"):
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for row in rows:
        plain = [str(row[name]) for name in ("id", "name", "tenant", "scope", "capture")]
        table.add_row(*plain, _limits_in_words(row), _minute(row["created"]), _minute(row["revoked"]))
    out.print(table, markup=False)


def _minute(moment: object) -> str:
    """UTC to the minute, on two lines where the terminal is narrow; "" for never."""
    return str(moment or "")[:16].replace("T", " ")


@commands.command()
def revoke(id: Id, file: File = None, url: Url = "", key: AdminKey = "") -> None:
    """Make a key invalid; running gateways refuse it within two seconds."""
    row = keys_at(file, url, key).revoke(id)
    out.print(f"revoked {row['id']} ({row['name']})", markup=False)


@commands.command()
def consent(id: Id, capture: Capture, file: File = None, url: Url = "", key: AdminKey = "") -> None:
    """Change what may be kept of a key's requests; running gateways honour it within two seconds.

    What was kept before stays until it expires, or until its tenant's data is deleted.
    """
    row = keys_at(file, url, key).change(id, capture=capture, limits={})
    out.print(f"{row['id']} ({row['name']}): capture {row['capture']}", markup=False)


@commands.command()
def limit(
    id: Id,
    requests_per_minute: Amount = None,
    tokens_per_minute: Amount = None,
    concurrency: Amount = None,
    file: File = None,
    url: Url = "",
    key: AdminKey = "",
) -> None:
    """Change how much a key may use over all gateways together; what is not given stays."""
    given = dict(zip(_LIMITS, (requests_per_minute, tokens_per_minute, concurrency), strict=True))
    limits = {name: value for name, value in given.items() if value is not None}
    if not limits:
        raise ConfigError("give one of --requests-per-minute, --tokens-per-minute and --concurrency")
    row = keys_at(file, url, key).change(id, capture=None, limits=limits)
    out.print(f"{row['id']} ({row['name']}): {_limits_in_words(row)}", markup=False)


def _row(key: Key) -> Row:
    """What programs see of a key."""
    return {
        "id": key.id,
        "name": key.name,
        "created": key.created,
        "revoked": key.revoked,
        "tenant": key.owner,
        "scope": key.scope,
        "capture": key.capture,
        **msgspec.structs.asdict(key.limits),
    }


def _from_answer(key: Row) -> Row:
    """The same of what Control answers."""
    plain = {name: key[name] for name in ("id", "name", "tenant", "scope", "capture")}
    times = {name: _iso(key[name]) for name in ("created", "revoked")}
    return {**plain, **times, **key["limits"]}


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _limits_in_words(row: Row) -> str:
    words = {
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
        "concurrency": "at once",
    }
    return ", ".join(f"{row[name]} {words[name]}" for name in _LIMITS if row[name]) or "configured"


def _checked(id: str) -> str:
    """An id as it may stand in an address."""
    if not id.isalnum():
        raise ConfigError(f"key id {id[:80]!r}: expected letters and digits, as `paceline keys list` shows")
    return id
