"""`dashboard/src/api.ts` and the models of the admin API: the same names, the same optional and nullable fields."""

import re
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from paceline.cluster.admin import answers, archive_answers, desk_answers, problems, requests

ANSWERS = (answers, desk_answers, archive_answers)
API_TS = Path(__file__).resolve().parents[3] / "dashboard" / "src" / "api.ts"
RENAMED = {
    "SettingsChange": requests.SettingsChange,
    "SignIn": requests.SignIn,
    "ActionBody": requests.ActionBody,
    "KeyCreate": requests.KeyCreate,
    "KeyUpdate": requests.KeyUpdate,
}
NOT_MODELS = {"ApiError": problems.ErrorAnswer, "Events": None}
_INTERFACE = re.compile(r"export interface (\w+)(?:<T>)?(?: extends (\w+))? \{(.*?)\n\}", re.DOTALL)
_UNION = re.compile(r"export type (\w+) =([^;]+);")


def uncommented(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def parse(text: str) -> dict[str, tuple[str, dict[str, tuple[str, bool]]]]:
    """TypeScript -> by interface: what it extends, and its fields with their type and whether they are optional."""
    found = {}
    for name, base, body in _INTERFACE.findall(uncommented(text)):
        fields: dict[str, tuple[str, bool]] = {}
        depth, part = 0, ""
        for char in body:
            depth += {"{": 1, "}": -1, "<": 1, ">": -1}.get(char, 0)
            if char == ";" and depth == 0:
                key, _, kind = part.strip().partition(":")
                fields[key.rstrip("?")] = (" ".join(kind.split()), key.endswith("?"))
                part = ""
            else:
                part += char
        found[name] = (base, fields)
    return found


def unions(text: str) -> dict[str, set[str]]:
    """TypeScript -> by name: the strings of a union of strings."""
    found = {}
    for name, body in _UNION.findall(uncommented(text)):
        options = {option.strip() for option in body.split("|") if option.strip()}
        if all(option.startswith('"') for option in options):
            found[name] = {option.strip('"') for option in options}
    return found


TEXT = API_TS.read_text()
INTERFACES = parse(TEXT)


def fields_of(name: str) -> dict[str, tuple[str, bool]]:
    base, own = INTERFACES[name]
    return {**(fields_of(base) if base else {}), **own}


def answer(name: str) -> Any:
    """A model or a union of strings, wherever it stands."""
    return next(vars(module)[name] for module in ANSWERS if name in vars(module))


def model_of(name: str) -> type[BaseModel]:
    found = RENAMED.get(name) or NOT_MODELS.get(name) or answer(name)
    assert issubclass(found, BaseModel)
    return found


def type_of(annotation: Any) -> str:
    """A Python type in TypeScript's words; names of unions of strings are not followed."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(sorted({type_of(part) for part in get_args(annotation)}))
    if origin is list:
        return f"{type_of(get_args(annotation)[0])}[]"
    if origin is dict:
        return "Record"
    if hasattr(annotation, "__value__"):
        return type_of(annotation.__value__)
    if str(origin) == "typing.Literal" or annotation in (str,):
        return "string"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return type_of(get_args(annotation)[0])
    if annotation in (int, float):
        return "number"
    if annotation is bool:
        return "boolean"
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))


def plain(kind: str, names: dict[str, set[str]]) -> str:
    """A TypeScript type in the same words."""
    kind = kind.strip()
    if kind.endswith("[]"):
        return f"{plain(kind[:-2].strip('()'), names)}[]"
    if kind.startswith("Record<"):
        return "Record"
    if kind.startswith("{"):
        return "object"
    parts = {
        "string" if part.startswith('"') or part in names else part
        for part in map(str.strip, kind.split("|"))
    }
    return " | ".join(sorted(parts))


def test_the_parser_reads_what_there_is() -> None:
    """Or the comparison below would compare nothing."""
    assert len(INTERFACES) > 40
    assert fields_of("VersionDetail").keys() > fields_of("Version").keys()
    assert fields_of("ActionBody")["confirm"] == ("string", True)
    assert fields_of("Overview")["live"] == ("LiveVersion | null", False)


@pytest.mark.parametrize("name", sorted(INTERFACES.keys() - {"Page", "Events"}))
def test_every_interface_is_a_model_with_the_same_fields(name: str) -> None:
    """Names, optionality, nullability and kinds of all fields."""
    model, fields = model_of(name), fields_of(name)
    names = unions(TEXT)
    mine = {field.serialization_alias or key: field for key, field in model.model_fields.items()}

    assert mine.keys() == fields.keys()
    for key, (kind, is_optional) in fields.items():
        field = mine[key]
        assert is_optional == (not field.is_required()), f"{name}.{key}: optional in one of them only"
        expected, actual = plain(kind, names), type_of(field.annotation)
        if is_optional:
            actual = actual.replace(" | null", "").replace("null | ", "")
        if "object" in expected or name in ("ApiError", "FiguresDelta"):
            continue  # written out in api.ts, named here; the test below sees their fields
        assert actual == expected, f"{name}.{key}"


def test_every_answer_is_in_the_contract() -> None:
    """Nothing is answered that api.ts does not know, but the parts that it writes out in place."""
    inline = {"Answer", "RefusedVersion", "TrainedOn", "HistoryEntry", "GateSummary", "DeltaPoint", "Page"}
    models = {
        name
        for module in ANSWERS
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__
    }

    assert models - inline - INTERFACES.keys() == set()
    for name in (
        "refused: { version: string; reason: string }[]",
        "trained_on: { tenant: string; num_requests",
    ):
        assert name in " ".join(uncommented(TEXT).split())


@pytest.mark.parametrize("name", sorted(unions(TEXT)))
def test_unions_of_strings_are_the_same(name: str) -> None:
    """A state that only one side knows would be shown as nothing."""
    mine = answer(name)

    assert set(get_args(mine)) == unions(TEXT)[name]


def test_a_difference_is_seen() -> None:
    """Negative control: a field added, dropped, made optional or nullable in api.ts alone."""
    text = "export interface Route {\n  tag: string;\n  version?: string | null;\n  extra: number;\n}\n"
    _, fields = parse(text)["Route"]

    assert fields == {
        "tag": ("string", False),
        "version": ("string | null", True),
        "extra": ("number", False),
    }
    assert {key for key in desk_answers.Route.model_fields} != fields.keys()
