"""`paceline deploy` -> what it says and does when Ray is slow, wants its token, refuses, or is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from paceline.cluster.errors import ConfigError, PacelineError, Unavailable
from paceline.deploy import cli, ray_deploy
from paceline.deploy.ray_deploy import RayCluster, dashboard_url, last_line, missing, ray_token

URL = "http://ray:8265"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_deploy, "_TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(ray_deploy, "_POLL_S", 0.0)


def cluster(handler: Callable[[httpx.Request], httpx.Response], said: list[str]) -> RayCluster:
    return RayCluster(URL, "token", say=said.append, transport=httpx.MockTransport(handler))


def states(*found: dict[str, Any]) -> Callable[[httpx.Request], httpx.Response]:
    """One application after the other; the last one stays."""
    left = list(found)

    def answer(_: httpx.Request) -> httpx.Response:
        state = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(200, json={"applications": {"paceline": state}})

    return answer


def test_the_configuration_is_put_with_the_token() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    with cluster(answer, []) as ray:
        ray.deploy({"applications": []}, patience_s=0.0)

    assert (seen[0].method, str(seen[0].url)) == ("PUT", f"{URL}/api/serve/applications/")
    assert seen[0].headers["authorization"] == "Bearer token" and json.loads(seen[0].content) == {
        "applications": []
    }


def test_it_waits_for_the_last_replica_and_says_for_which() -> None:
    deployments = {
        "decode": {
            "status": "UPDATING",
            "target_num_replicas": 2,
            "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
        },
        "draft": {"status": "HEALTHY", "target_num_replicas": 1, "replicas": [{"state": "RUNNING"}]},
    }
    said: list[str] = []
    waiting = {"status": "DEPLOYING", "deployments": deployments}

    with cluster(states({"status": "DEPLOYING"}, waiting, waiting, {"status": "RUNNING"}), said) as ray:
        ray.wait_until_running(limit_s=5.0)

    assert said == ["Ray Serve builds the application", "decode: 1 of 2 running"]


def test_a_refused_application_is_one_line() -> None:
    """Serve's message is a traceback; its last line is what went wrong."""
    message = 'Deploying app failed\n  File "x.py", line 3\npaceline.cluster.errors.ConfigError: decode.tp=3: expected 1..2\n'

    with (
        cluster(states({"status": "DEPLOY_FAILED", "message": message}), []) as ray,
        pytest.raises(PacelineError) as refused,
    ):
        ray.wait_until_running(limit_s=5.0)

    assert str(refused.value) == "not deployed: decode.tp=3: expected 1..2"


def test_a_cluster_without_paceline_is_told_what_it_lacks() -> None:
    state = {"status": "DEPLOY_FAILED", "message": "x\nModuleNotFoundError: No module named 'paceline'\n"}

    with cluster(states(state), []) as ray, pytest.raises(PacelineError, match="needs the same wheel"):
        ray.wait_until_running(limit_s=5.0)


def test_a_worker_that_cannot_start_is_named() -> None:
    deployments = {
        "decode": {"status": "DEPLOY_FAILED", "message": "x\nModelError: /weights/t/config.json: missing"}
    }
    state = {
        "status": "DEPLOY_FAILED",
        "message": "The deployments ['decode'] are UNHEALTHY.",
        "deployments": deployments,
    }

    with cluster(states(state), []) as ray, pytest.raises(PacelineError) as refused:
        ray.wait_until_running(limit_s=5.0)

    assert "decode: /weights/t/config.json: missing" in str(refused.value)


def test_what_never_runs_is_named_at_the_limit() -> None:
    state = {
        "status": "DEPLOYING",
        "deployments": {"draft": {"status": "UPDATING", "target_num_replicas": 1}},
    }

    with (
        cluster(states(state), []) as ray,
        pytest.raises(PacelineError, match="not running after 0 s: draft: 0 of 1 running"),
    ):
        ray.wait_until_running(limit_s=0.0)


def test_a_head_that_is_not_there_yet_is_tried_again() -> None:
    """One line for each reason, not one for each attempt."""
    left = [0] * 3
    said: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            left.pop()
            raise httpx.ConnectError("Connection refused")
        return httpx.Response(200, json={})

    with cluster(answer, said) as ray:
        ray.deploy({}, patience_s=30.0)

    assert len(said) == 1 and "Connection refused; trying again" in said[0]


def test_a_head_that_never_comes_is_one_line() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("")

    with (
        cluster(answer, []) as ray,
        pytest.raises(Unavailable, match=f"no Ray cluster answers at {URL}: ConnectTimeout"),
    ):
        ray.deploy({}, patience_s=0.05)


@pytest.mark.parametrize("code", [401, 403])
def test_a_wrong_token_is_not_tried_again(code: int) -> None:
    asked: list[int] = []

    def answer(_: httpx.Request) -> httpx.Response:
        asked.append(1)
        return httpx.Response(code)

    with (
        cluster(answer, []) as ray,
        pytest.raises(PacelineError, match="wants its token.*is not the right one"),
    ):
        ray.deploy({}, patience_s=30.0)

    assert len(asked) == 1


@pytest.mark.parametrize("body", ["<html>", "[]", '{"applications": 3}', '{"applications": {"paceline": 1}}'])
def test_something_else_at_that_address_is_noticed(body: str) -> None:
    with (
        cluster(lambda _: httpx.Response(200, text=body), []) as ray,
        pytest.raises(PacelineError, match="does not answer as Ray's dashboard"),
    ):
        ray.wait_until_running(limit_s=1.0)


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head:8265", "http://", "http://head:8265/api", "8265", "http://[::"]
)
def test_an_address_that_is_no_dashboard_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:8265"):
        dashboard_url(address)


def test_addresses_of_dashboards() -> None:
    assert dashboard_url("auto") == "http://127.0.0.1:8265"
    assert dashboard_url("https://ray.example/") == "https://ray.example"


def test_the_token_is_found_where_ray_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert ray_token() == "home"
    (tmp_path / "file").write_text("file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    assert ray_token() == "file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "variable")
    assert ray_token() == "variable"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no such file"):
        ray_token()


def test_print_is_what_serve_deploy_reads() -> None:
    done = CliRunner().invoke(cli.app, ["deploy", "--print", "--set", "decode.replicas=2"])

    config = yaml.safe_load(done.stdout)
    assert done.exit_code == 0
    assert config["applications"][0]["deployments"][1] == {"name": "decode", "num_replicas": 2}
    assert "admin" not in config["applications"][0]["args"]


def test_deploy_wants_an_address() -> None:
    done = CliRunner().invoke(cli.app, ["deploy"])

    assert isinstance(done.exception, ConfigError) and "--ray: expected http://HOST:8265" in str(
        done.exception
    )


@pytest.mark.parametrize(
    "text, line",
    [
        ("", "no reason given"),
        ("one\ntwo\n", "two"),
        ("a\nray.exceptions.RayTaskError(ConfigError): x\nConfigError: decode=1: y\n  at z", "decode=1: y"),
        ("a\nRuntimeError: 0.0.0.0:8000 is in use\n", "0.0.0.0:8000 is in use"),
    ],
)
def test_the_end_of_a_traceback_is_what_matters(text: str, line: str) -> None:
    assert last_line(text) == line


def test_a_healthy_application_misses_nothing() -> None:
    assert missing({"deployments": {"decode": {"status": "HEALTHY"}}}) == "" and missing({}) == ""
