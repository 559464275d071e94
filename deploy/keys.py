"""PACELINE_HOME or a configuration -> the file of API keys, and the commands that create, list and revoke them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cluster.config import GatewayConfig
from paceline.cluster.errors import ConfigError
from paceline.cluster.keys import Key, KeyFile, check_guarded, needs_keys
from paceline.deploy import local

commands = typer.Typer(
    no_args_is_help=True, help="API keys: who may use a gateway. It notices changes by itself."
)
out = Console(highlight=False)

File = Annotated[
    Path | None, typer.Option(help="The gateway's gateway.keys_file; keys.json in PACELINE_HOME by default.")
]


def key_file(path: Path | None) -> KeyFile:
    """The store at this path, or the default one."""
    return KeyFile(path or local.home() / "keys.json")


def keys_for(gateway: GatewayConfig) -> KeyFile | None:
    """What a gateway with this configuration asks; None if it serves everybody.

    Raises:
        ConfigError: others can reach it, and nothing says that this was meant; or the path is a relative one.
    """
    path = None if gateway.keys_file == "auto" else Path(gateway.keys_file)
    if path is not None and not path.is_absolute():  # each process of a cluster has its own working directory
        raise ConfigError(f"gateway.keys_file={gateway.keys_file!r}: expected an absolute path, or auto")
    store = key_file(path)
    check_guarded(gateway.auth, gateway.host, store)
    return store if needs_keys(gateway.auth, gateway.host) else None


Capture = Annotated[
    str,
    typer.Option(
        help="What of its requests may be kept for training: never; asked (those with store=true); "
        "or default (those without store=false). Nothing is where learning.enabled is off."
    ),
]


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, or what for.")],
    tenant: Annotated[
        str, typer.Option(help="Whose requests those with it are; the name, if left out.")
    ] = "",
    capture: Capture = "never",
    file: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Make a key and show it, once: only its hash is kept."""
    store = key_file(file)
    key, text = store.create(name, tenant=tenant, capture=capture)
    if as_json:
        print(json.dumps({**_row(key), "key": text}))
        return
    out.print(text, markup=False, soft_wrap=True)
    out.print(
        f"id {key.id} in {store.path}; the key itself is not kept, so note it now",
        markup=False,
        soft_wrap=True,
    )


@commands.command("list")
def show(
    file: File = None, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show every key by id and name."""
    store = key_file(file)
    keys = store.read()
    if as_json:
        print(json.dumps([_row(key) for key in keys]))
        return
    if not keys:
        out.print(
            f"no API keys in {store.path}; `paceline keys create NAME` makes one",
            markup=False,
            soft_wrap=True,
        )
        return
    table = Table(title=str(store.path), title_justify="left")
    for column in ("id", "name", "tenant", "capture", "created", "revoked"):
        table.add_column(column, no_wrap=column not in ("name", "tenant"))
    for key in keys:
        table.add_row(key.id, key.name, key.owner, key.capture, key.created, key.revoked or "")
    out.print(table, markup=False)


@commands.command()
def revoke(id: Annotated[str, typer.Argument(help="As `list` shows it.")], file: File = None) -> None:
    """Make a key invalid; running gateways refuse it within a second."""
    key = key_file(file).revoke(id)
    out.print(f"revoked {key.id} ({key.name})", markup=False)


@commands.command()
def consent(
    id: Annotated[str, typer.Argument(help="As `list` shows it.")], capture: Capture, file: File = None
) -> None:
    """Change what may be kept of a key's requests; running gateways honour it within a second.

    What was kept before stays until it expires, or until its tenant's data is deleted.
    """
    key = key_file(file).consent(id, capture)
    out.print(f"{key.id} ({key.name}): capture {key.capture}", markup=False)


def _row(key: Key) -> dict[str, str | None]:
    """What programs see of a key."""
    return {
        "id": key.id,
        "name": key.name,
        "created": key.created,
        "revoked": key.revoked,
        "tenant": key.owner,
        "capture": key.capture,
    }
