"""Configuration, command line, OpenAPI documents -> the Markdown of the reference pages. Nothing in them is written twice."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.config import ClusterConfig, load_config, presets
from paceline.cluster.control import Control
from paceline.cluster.gateway.openapi import describe
from paceline.deploy.cli import app
from paceline.deploy.resolved import context_limit

Tree = dict[str, Any]


# --- knobs ------------------------------------------------------------------------------------------------


def fields_of(section: type[BaseModel], path: str) -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of a section's own fields, without those of sections inside it."""
    for name, field in section.model_fields.items():
        if not is_section(field.annotation):
            yield f"{path}.{name}", field


def sections_of(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, section) of every section at or below this one."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if is_section(kind):
            assert isinstance(kind, type)
            below = f"{path}.{name}".lstrip(".")
            yield below, kind
            yield from sections_of(kind, below)


def is_section(kind: Any) -> bool:
    """Whether a field holds fields of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def knobs() -> str:
    """A table for each section: field, default, what is legal, what it does, what a preset makes of it."""
    said = {name: yaml.safe_load(path.read_text()) for name, path in presets().items()}
    lines: list[str] = []
    for path, section in sections_of(ClusterConfig):
        lines += [
            f"## `{path}` {{#{path}}}",
            "",
            _prose(section.__doc__),
            "",
            "| field | default | legal | |",
            "|---|---|---|---|",
        ]
        for name, field in fields_of(section, path):
            words = _cell(field.description) or "Like its neighbour below, which describes both."
            default = field.get_default(call_default_factory=True)
            for preset, tree in said.items():
                value = _at(tree, name)
                if value is not None and value != default:
                    words += f" Preset `{preset}`: `{_plain(value)}`."
            # The anchor is the field's name, so that other pages can point at it.
            lines.append(
                f'| <code id="{name}">{name.rpartition(".")[2]}</code> | `{_plain(default)}` | {_legal(field)} | {words} |'
            )
        lines.append("")
    return "\n".join(lines)


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _legal(field: FieldInfo) -> str:
    """A field's type and range, in words."""
    options = (
        typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
    )
    if options:
        return ", ".join(f"`{_plain(option)}`" for option in options)
    bounds = {
        sign: getattr(item, sign)
        for item in field.metadata
        for sign in ("ge", "gt", "le", "lt")
        if hasattr(item, sign)
    }
    low = f"{bounds['ge']:,}" if "ge" in bounds else f"above {bounds['gt']:,}" if "gt" in bounds else ""
    high = f"{bounds['le']:,}" if "le" in bounds else f"below {bounds['lt']:,}" if "lt" in bounds else ""
    if low and high:
        return f"{_type(field.annotation)}, {low} to {high}"
    return f"{_type(field.annotation)}{', ' if low or high else ''}{low or high}"


def _type(kind: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    if kind in names:
        return names[kind]
    origin = typing.get_origin(kind)
    if origin is list:
        return "list"
    if origin is dict:
        return "mapping"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(option) for option in typing.get_args(kind) if option is not type(None))
    return getattr(kind, "__name__", str(kind))


def _plain(value: Any) -> str:
    """As in YAML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return '""'
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("...").strip()


# --- command line -----------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """(words, command) of every command and of every group of them, such as (`paceline keys create`, ...)."""
    yield from _below("paceline", typer.main.get_command(app))


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    # By what it has: Typer brings classes of its own, which are not click's.
    for name, child in getattr(command, "commands", {}).items():
        yield f"{words} {name}", child
        yield from _below(f"{words} {name}", child)


def cli() -> str:
    """Every command: what it does, its arguments and options."""
    lines: list[str] = []
    for words, command in commands():
        usage = " ".join([words, *command.collect_usage_pieces(typer.Context(command))])
        lines += [f"{'#' * words.count(' ')}# `{words}`", "", _prose(command.help), "", f"`{usage}`", ""]
        hints = typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
        rows = [_option(p, hints[p.name]) for p in command.params if p.name in hints]
        if rows:
            lines += ["| | | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _option(parameter: Any, hint: Any) -> str:
    is_option = any(name.startswith("-") for name in parameter.opts)
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    options = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    kind = options[0] if typing.get_origin(hint) in (typing.Union, types.UnionType) else hint
    is_list = typing.get_origin(kind) is list
    words = (
        "" if kind is bool else _type(typing.get_args(kind)[0]) + ", repeatable" if is_list else _type(kind)
    )
    default = "" if parameter.default in (None, "", False) else f"`{parameter.default}`"
    shown = "required" if parameter.required else default
    return f"| {', '.join(f'`{name}`' for name in names)} | {words} | {shown} | {_cell(parameter.help)} |"


# --- HTTP -------------------------------------------------------------------------------------------------


@functools.cache
def gateway_document() -> Tree:
    """Of a gateway with the preset for one machine and the bundled models; a running one serves its own."""
    config = load_config("laptop")
    context, _ = context_limit(config)
    return describe(config.model.name, max_context=context, vocab_size=4096, refusals=[401, 421])


@functools.cache
def admin_document() -> Tree:
    """Of Control, which need not run for it."""
    return build_admin_app(Control(load_config("laptop")), b"").openapi()


def http() -> str:
    return _api(gateway_document())


def admin() -> str:
    return _api(admin_document())


def _api(document: Tree) -> str:
    """Operations, then schemas: each once, with links from one to the other."""
    lines = ["## Operations", ""]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += [
                f"### `{method.upper()} {path}`",
                "",
                _prose(operation.get("description") or operation.get("summary")),
                "",
            ]
            rows = [
                f"| `{p['name']}` | {p['in']} | {_schema(p['schema'])} | {_cell(p.get('description') or p['schema'].get('description'))} |"
                for p in operation.get("parameters", ())
            ]
            if rows:
                lines += ["| parameter | in | | |", "|---|---|---|---|", *rows, ""]
            for media, content in operation.get("requestBody", {}).get("content", {}).items():
                lines += [f"Body (`{media}`): {_schema(content['schema'])}", ""]
            lines += ["| status | body | |", "|---|---|---|"]
            for status, answer in operation["responses"].items():
                bodies = [
                    f"{_schema(content.get('schema') or content.get('itemSchema') or {})} (`{media}`)"
                    for media, content in answer.get("content", {}).items()
                ]
                lines.append(f"| {status} | {', '.join(bodies)} | {_cell(answer.get('description'))} |")
            lines.append("")
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### `{name}` {{#schema-{name.lower()}}}", "", _prose(schema.get("description")), ""]
        if not schema.get("properties"):
            lines += [_schema(schema), ""]
            continue
        required = schema.get("required", ())
        lines += ["| field | | default | |", "|---|---|---|---|"]
        for field, kind in schema["properties"].items():
            default = (
                "required"
                if field in required
                else f"`{_plain(kind['default'])}`"
                if kind.get("default") is not None
                else ""
            )
            lines.append(f"| `{field}` | {_schema(kind)} | {default} | {_cell(kind.get('description'))} |")
        lines.append("")
    return "\n".join(lines)


def _schema(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to those that have a name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#schema-{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            found = dict.fromkeys(_schema(option) for option in schema[key])
            return " or ".join(found)
    if "enum" in schema:
        return ", ".join(f"`{_plain(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_plain(schema['const'])}`"
    kind = schema.get("type", "anything")
    if kind == "array":
        inner = _schema(schema["items"]) if schema.get("items") else "anything"
        return f"list of {inner}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {_schema(schema['additionalProperties'])}"
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    return f"{kind}{_bounds(schema, 'minimum', 'maximum')}{_bounds(schema, 'minLength', 'maxLength')}"


def _bounds(schema: Mapping[str, Any], low: str, high: str) -> str:
    upper = schema.get(high, schema.get("exclusiveMaximum") if high == "maximum" else None)
    lower = schema.get(low, schema.get("exclusiveMinimum") if low == "minimum" else None)
    if lower is None and upper is None:
        return ""
    unit = " long" if "Length" in low else ""
    if upper is None:
        return f", from {lower}{unit}" if lower else ""
    return f", {lower if lower is not None else '-'} to {upper}{unit}"


def _prose(text: str | None) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def _cell(text: str | None) -> str:
    """Words for one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


MAKERS: dict[str, Callable[[], str]] = {"knobs": knobs, "cli": cli, "http-api": http, "admin-api": admin}
"""What a page may ask for."""
