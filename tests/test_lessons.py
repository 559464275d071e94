"""What broke in other servers, each with the test that would break here: a table, and the tests it has no better place for."""

from __future__ import annotations

import ast
import hmac
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster import keys as keys_module
from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.keys import KeyFile
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Request
from scripted_gateway import CHAT, TEXT, byte_tokenizer, inside, spell

ROOT = Path(__file__).resolve().parent
PACKAGES = ("cluster", "workers", "kernels", "deploy")

LESSONS: dict[str, tuple[str, ...]] = {
    "Nothing is unpickled, from sockets or files (CVE-2025-32444, -29783, -66455, CVE-2024-11041)": (
        "test_lessons.py::test_nothing_that_runs_code_when_it_is_read_is_imported_or_called",
        "cluster/test_wire.py::test_a_bad_frame_closes_an_open_connection",
        "cluster/test_wire.py::test_whatever_is_no_greeting_closes_the_connection",
    ),
    "Sockets bind to one named interface": (
        "workers/test_kv_link.py::test_nothing_listens_off_the_configured_interface",
        "end_to_end/test_cluster.py::test_all_sockets_listen_on_loopback_only",
    ),
    "Handles of ours that stand in a request are nobody's (CVE-2026-115912, CVE-2026-105754)": (
        "test_lessons.py::test_what_a_request_says_of_our_insides_is_not_heard",
    ),
    "KV is taken from its pair only, whole, in time, for its owner (vLLM's security guide)": (
        "workers/test_kv_link.py::test_who_does_not_know_the_pairs_key_finds_nobody",
        "cluster/test_handoff.py::test_a_reservation_that_does_not_match_is_refused_by_name",
        "faults/test_handoff_faults.py::test_messages_of_a_stale_epoch_or_another_incarnation_are_refused",
        "faults/test_handoff_faults.py::test_a_flipped_bit_is_refused",
        "cluster/test_wire.py::test_a_listener_refuses_a_dialer_with_another_secret",
    ),
    "Weights are safetensors, and code in their folder stays a file (CVE-2026-22807, CVE-2025-62164)": (
        "workers/test_bad_models.py::test_a_pickle_is_never_opened_whatever_its_name",
        "workers/test_bad_models.py::test_code_in_a_model_folder_never_runs",
    ),
    "Templates are the model's alone, in a sandbox (CVE-2025-62426, CVE-2026-115911, -115918)": (
        "test_lessons.py::test_what_a_request_says_of_our_insides_is_not_heard",
        "test_lessons.py::test_a_template_reaches_nothing_outside_itself",
        "cluster/gateway/test_text.py::test_a_user_cannot_forge_a_turn",
        "cluster/gateway/test_text.py::test_a_refusing_template_is_the_clients_error",
    ),
    "Everything is bounded before anything is made of it (CVE-2026-34756, CVE-2025-48944)": (
        "cluster/gateway/test_schemas.py::test_a_bad_value_is_named_with_its_legal_range",
        "cluster/gateway/test_schemas.py::test_prompts_times_choices_are_bounded",
        "cluster/gateway/test_listener.py::test_headers_without_end_are_refused",
        "cluster/gateway/test_listener.py::test_a_large_body_ends_its_connection",
        "cluster/gateway/test_bad_input.py::test_no_tree_of_values_is_more_than_a_4xx",
    ),
    "Grammars and tools are refused by name until they are compiled with limits (GHSA-hf3c-wxg2-49q9)": (
        "cluster/gateway/test_schemas.py::test_what_is_not_served_yet_is_refused_by_name",
    ),
    "No URL in a request is ever fetched (CVE-2026-24779, -25960, -34753, -100650)": (
        "cluster/gateway/test_schemas.py::test_a_bad_value_is_named_with_its_legal_range",
        "test_lessons.py::test_a_picture_s_address_is_refused_and_not_asked",
    ),
    "Every route is closed unless it is named, and operators have a port of their own": (
        "cluster/test_door.py::test_no_route_is_open_but_those_named_here",
        "cluster/test_door.py::test_wrong_revoked_and_foreign_keys_open_nothing_more",
        "cluster/test_door.py::test_no_spelling_of_a_path_gets_around_the_key",
        "cluster/test_door.py::test_operators_routes_are_on_control_s_port_only",
    ),
    "Keys are hashed, compared in constant time, shown once, and known to logs by their id (CVE-2025-59425)": (
        "test_lessons.py::test_every_key_is_compared_as_a_whole_known_or_not",
        "cluster/test_keys.py::test_the_file_holds_hashes_and_is_its_owners_alone",
        "cluster/test_door.py::test_secrets_are_in_no_log_metric_answer_or_file",
        "cluster/admin/test_key_desk.py::test_a_key_is_made_shown_once_changed_and_revoked",
    ),
    "Tenants share no computed prefix": (
        "workers/test_tenants.py::test_one_tenant_sees_nothing_of_what_another_asked_and_got",
        "workers/test_tenants.py::test_no_salt_a_client_sends_makes_it_another_tenant",
    ),
    "What is captured is the tenant's: by consent, deletable, and gated before it drafts for anybody": (
        "cluster/learning/test_consent.py::test_all_three_must_agree",
        "workers/test_tenants.py::test_no_worker_keeps_finished_answers_for_drafting_at_all",
        "workers/test_capture.py::test_what_is_deleted_while_it_is_in_memory_is_never_written",
        "cluster/learning/test_gate.py::test_too_few_requests_decide_nothing",
    ),
    "Ray's dashboard and job port run code for whoever reaches them (CVE-2023-48022, -6019, -48023, CVE-2025-62593)": (
        "deploy/helm/test_chart.py::test_ray_s_own_ports_are_closed",
        "deploy/ray_up/test_cluster_yaml.py::test_ray_s_ports_are_closed_and_its_token_is_on",
        "deploy/ray_up/test_ray_up.py::test_others_reach_the_gateway_and_nothing_else",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_has_its_tests(lesson: str) -> None:
    """By name: who renames or drops one has to look at what it was for."""
    for test in LESSONS[lesson]:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in found, test


# --- code that runs what it reads -------------------------------------------------------------------------

_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"})
_CALLS = frozenset(
    {"torch.load", "eval", "exec", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "os.system"}
)
_KEPT = frozenset({"deploy/bench/peers", "deploy/models"})
"""Other engines' own programs and the script that made the bundled models: no part of a cluster."""


def dangers(source: str) -> list[str]:
    """What in a module runs code that it reads, or may: imports, calls, and arguments that allow it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in _MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _MODULES:
            found.append(str(node.module))
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in _CALLS:
                found.append(ast.unparse(node.func))
            for keyword in node.keywords:
                is_true = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and is_true:
                    found.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


def test_nothing_that_runs_code_when_it_is_read_is_imported_or_called() -> None:
    """In no module of a running cluster."""
    for package in PACKAGES:
        for path in (ROOT.parent / package).rglob("*.py"):
            name = path.relative_to(ROOT.parent).as_posix()
            if not name.startswith(tuple(_KEPT)):
                assert dangers(path.read_text()) == [], name


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "import torch\ntorch.load(f, weights_only=True)", "eval(x)",
     "m.from_pretrained(f, trust_remote_code=True)", "m.from_pretrained(f, trust_remote_code=flag)", "np.load(f)",
     "run(c, shell=True)"],
)  # fmt: skip
def test_such_code_would_be_seen(source: str) -> None:
    """Negative control."""
    assert len(dangers(source)) == 1
    assert dangers("m.from_pretrained(f, trust_remote_code=False)\nmodel.eval()\nre.compile(x)") == []


# --- what requests say ------------------------------------------------------------------------------------

INSIDES: dict[str, Any] = {
    "kv_transfer_params": {"remote_block_ids": [1], "remote_host": "10.0.0.1", "remote_engine_id": "x"},
    "mm_processor_kwargs": {"x": 1}, "prompt_embeds": "AAAA", "shm_name": "/psm_1", "handle": "gASVAAAA", "kv_source": "link",
    "chat_template": "{{ ''.__class__.__mro__ }}", "chat_template_kwargs": {"x": "{{ 7 * 7 }}"}, "add_generation_prompt": False,
    "id": "other", "request_id": "other", "tenant": "beta", "capture": True, "digest": "00", "decode_worker": "decode-a", "epoch": 7,
    "x_data_parallel_rank": 1, "lora_request": {"path": "/etc"}, "model_path": "/etc", "documents": [{"x": "y"}],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_a_request_says_of_our_insides_is_not_heard(tmp_path: Path, path: str) -> None:
    """Blocks, handles, workers, templates, tenants: each is refused by name, or the stream is the same as without it."""
    tokenizer = byte_tokenizer(tmp_path)
    streams = ScriptedStreams(spell(tokenizer, "x"))
    body = {**(CHAT if path.endswith("chat/completions") else TEXT), "seed": 5}
    refused = []
    async with inside(tokenizer, Metrics(), streams) as client:
        for extra in ({}, *({name: value} for name, value in INSIDES.items())):
            answer = await client.post(path, json={**body, **extra}, headers={"x-request-id": "mine"})
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == "unsupported_parameter", answer.text
                refused.append(*extra)

    plain = streams.requests[0]
    assert isinstance(plain, Request) and (plain.tenant, plain.capture) == ("local", False)
    assert all(asked == plain for asked in streams.requests)
    assert len(streams.requests) == 1 + len(INSIDES) - len(refused) and len(refused) < 8, refused


def test_a_template_reaches_nothing_outside_itself(tmp_path: Path) -> None:
    """A model folder is less trusted than code: its template runs in a sandbox that ends at its own values."""
    from paceline.cluster.errors import RequestError
    from paceline.cluster.gateway.text import Tokenizer

    byte_tokenizer(tmp_path)
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set x = messages.append(1) %}{{ messages }}",
        "{{ self._TemplateReference__context.environment }}{{ lipsum.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(RequestError) as caught:
            text = Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
            assert "class" not in text and "root:" not in text, text
            raise RequestError("it said nothing")
        assert caught.value.status == 400


async def test_a_picture_s_address_is_refused_and_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a host, nor this machine's, nor a file."""
    asked: list[Any] = []
    tokenizer = byte_tokenizer(tmp_path)
    async with inside(tokenizer, Metrics(), ScriptedStreams([])) as client:
        monkeypatch.setattr("socket.getaddrinfo", lambda *a, **_: asked.append(a))
        monkeypatch.setattr("socket.create_connection", lambda *a, **_: asked.append(a))
        for url in (
            "http://169.254.169.254/latest",
            "http://localhost:8001/metrics",
            "file:///etc/passwd",
            "data:,x",
        ):
            content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
            body = {**CHAT, "messages": [{"role": "user", "content": content}]}
            refused: httpx.Response = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"

    assert asked == []


def test_every_key_is_compared_as_a_whole_known_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comparison of two hashes of equal length, whether the id is unknown, the secret wrong, or the key revoked."""
    store = KeyFile(tmp_path / "keys.json", recheck_s=0.0)
    key, text = store.create("ci")
    revoked, gone = store.create("gone")
    store.revoke(revoked.id)
    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(keys_module, "hmac", Spy)
    tried = [text, f"pl_{key.id}_{'x' * 43}", f"pl_{'0' * 12}_{'x' * 43}", gone, "", "x"]
    found = [store.find(one) for one in tried]

    assert [one is not None for one in found] == [True, False, False, False, False, False]
    assert len(compared) == len(tried)
    assert {len(side) for pair in compared for side in pair} == {64}
