"""The admin API's OpenAPI document: valid, complete, and kept to by every answer to requests made up from it."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
from fastapi import FastAPI

from paceline.cluster.admin import auth
from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.key import hash_key
from paceline.cluster.admin.sessions import Attempts
from paceline.cluster.control import Control
from scripted_admin import KEY

schemathesis = pytest.importorskip(
    "schemathesis", reason="THE ADMIN API IS NOT FUZZED: schemathesis is not installed"
)
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


async def test_the_document_is_told_to_operators(operator: httpx.AsyncClient, app: FastAPI) -> None:
    """The same that the application has, with all that is needed to use it."""
    document = (await operator.get("/admin/api/openapi.json")).json()

    assert document == app.openapi() and document["openapi"].startswith("3.1")
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method} {path}"
            assert operation.get("description"), f"{name} says nothing of itself"
            assert "401" in operation["responses"] and ("403" in operation["responses"]) == (
                method != "get"
            ), name
            for status, answer in operation["responses"].items():
                schema = answer.get("content", {}).get("application/json", {}).get("schema")
                assert status == "204" or schema, f"{name} {status}"
                if int(status) >= 400:
                    assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}, f"{name} {status}"


def test_every_schema_in_it_is_one(app: FastAPI) -> None:
    """By the rules of JSON Schema; nothing points nowhere."""
    document = app.openapi()
    schemas = document["components"]["schemas"]

    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in re.findall(r"'\$ref': '([^']+)'", str(document)):
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_every_route_is_in_it(app: FastAPI) -> None:
    """What is not: the stream of events, the document itself, and what is not of the API."""
    assert len(app.openapi()["paths"]) == 19


def fuzz(control: Control, num: int) -> dict[str, Counter[int]]:
    """Statuses of made-up requests by operation, half of them valid by the document, half not."""
    app = build_admin_app(control, hash_key(KEY))
    document = app.openapi()
    del document["security"]  # each request carries the key: others are tests of the guard
    document["paths"]["/admin/api/session"]["post"].pop("security")
    schema = schemathesis.openapi.from_dict(document)
    schema.app = app
    statuses: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        mine = statuses[operation.label] = Counter()
        for mode in schemathesis.GenerationMode:
            run_cases(operation.as_strategy(generation_mode=mode), mine, num)
    return statuses


def run_cases(cases: Any, statuses: Counter[int], num: int) -> None:
    checks = [getattr(schemathesis.checks, name) for name in CHECKS]

    @hypothesis.settings(
        max_examples=num,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.seed(1)
    @hypothesis.given(cases)
    def run(case: Any) -> None:
        headers = {**(case.headers or {}), "authorization": f"Bearer {KEY}", "host": "localhost"}
        response = case.call(headers=headers)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        pass  # an operation without anything to get wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_made_up_request_gets_a_surprising_answer(
    make_control: Callable[..., Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a 500; statuses, types and bodies as documented; what is not valid is refused."""
    patient = functools.partial(Attempts, burst=10**9, every_s=1.0)  # or made-up keys would end it all
    monkeypatch.setattr(auth, "Attempts", lambda clock, **_: patient(clock))
    statuses = fuzz(make_control(), 15)

    assert len(statuses) >= 18
    for label, counts in statuses.items():
        assert not any(status >= 500 for status in counts), f"{label}: {counts}"
    assert sum(counts[200] for counts in statuses.values()) > 40
    assert sum(counts[422] for counts in statuses.values()) > 30
