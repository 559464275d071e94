"""Our OpenAPI document against the gateway: schemathesis makes up requests from it, and no answer may be a surprise."""

import json
import re
from collections import Counter
from typing import Any

import hypothesis
import jsonschema
import pytest

from paceline.cluster.config import ClusterConfig, GatewayConfig
from paceline.cluster.gateway.fakes import Act, ScriptedStreams
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.openapi import describe
from paceline.cluster.gateway.schemas import ChatRequest, CompletionRequest
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Request
from scripted_gateway import MAX_CONTEXT, inside, scored_spell

schemathesis = pytest.importorskip(
    "schemathesis", reason="THE API IS NOT FUZZED: schemathesis is not installed"
)


def answers(tokenizer: Tokenizer) -> ScriptedStreams:
    """A short text for everyone, with the log-probabilities that were asked for."""

    def script(request: Request) -> list[Act]:
        return scored_spell(tokenizer, "Hello 😀", request)

    return ScriptedStreams(script)


def fuzz(tokenizer: Tokenizer, num_requests: int) -> dict[str, Counter[int]]:
    """Statuses of at least this many made-up requests, by operation: half of them valid by our document, half not."""
    config = ClusterConfig(gateway=GatewayConfig(auth="none"))  # schemathesis calls it by a name of its own
    app = build_app(config, answers(tokenizer), tokenizer, Metrics(), max_context=1 << 16)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        mine = statuses[operation.label] = Counter()
        # Almost all there is to get wrong is in the two operations that generate.
        is_generation = operation.method == "post"
        for mode in schemathesis.GenerationMode if is_generation else [schemathesis.GenerationMode.POSITIVE]:
            run_cases(
                operation.as_strategy(generation_mode=mode), mine, num_requests // 4 if is_generation else 20
            )
    return statuses


def run_cases(cases: Any, statuses: Counter[int], num: int) -> None:
    """Send them and check what comes."""
    names = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
    checks = [getattr(schemathesis.checks, name) for name in names]
    before = statuses.total()

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
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    while statuses.total() - before < num:
        done = statuses.total()
        run()
        if statuses.total() - done < num:  # there are no more different ones
            break


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(160), pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_made_up_requests_are_answered_as_the_document_says(tokenizer: Tokenizer, num_requests: int) -> None:
    """No server error; status, headers, content type and body as described; what the document forbids is refused."""
    statuses = fuzz(tokenizer, num_requests)

    generated = statuses["POST /v1/chat/completions"] + statuses["POST /v1/completions"]
    print(f"{sum(map(Counter.total, statuses.values()))} requests: {dict(generated)}")
    assert generated.total() >= num_requests
    assert generated[200] > 0.2 * num_requests, "too few got through to test anything behind the checks"
    assert all(status < 500 for counted in statuses.values() for status in counted)


def test_the_document_is_valid_and_has_every_field(tokenizer: Tokenizer) -> None:
    """By OpenAPI's own rules as far as jsonschema knows them: each schema is one, each reference leads somewhere."""
    document = describe("m", max_context=9, vocab_size=7, refusals=[401])
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)

    refs = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert refs <= set(schemas)
    for kind in (ChatRequest, CompletionRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
    assert document["security"] == [{"key": []}]
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert prompt[1]["items"]["exclusiveMaximum"] == 7
    assert schemas["ChatRequest"]["properties"]["max_tokens"]["anyOf"][0]["maximum"] == 9
    assert "401" in document["paths"]["/v1/models"]["get"]["responses"]


async def test_each_route_of_the_application_is_described(tokenizer: Tokenizer) -> None:
    """And no other."""
    async with inside(tokenizer, Metrics(), ScriptedStreams([])) as client:
        document = (await client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await client.request(method, path)
                assert answer.status_code not in (405, 500), (method, path)
    app = build_app(ClusterConfig(), ScriptedStreams([]), tokenizer, Metrics(), max_context=MAX_CONTEXT)
    routes = {route.path.replace(":path", "") for route in app.routes if route.path != "/openapi.json"}

    assert routes == set(document["paths"])
