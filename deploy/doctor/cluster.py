"""Addresses of a running cluster -> whether it serves: probes, workers, figures, clocks, one completion said twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from paceline.cluster.keys import is_loopback
from paceline.deploy.doctor.findings import Check, Finding, fail, ok, skip, warn

_TIMEOUT_S = 10.0
_COMPLETION_S = 60.0
_SKEW_S = 2.0


@dataclass(frozen=True)
class Cluster:
    """Where a cluster listens, and the keys to it; an empty address is not looked at."""

    gateway: str
    control: str
    api_key: str = ""
    admin_key: str = ""

    def checks(self) -> list[Check]:
        return [
            ("gateway", self.gateway_is_ready),
            ("control", self.workers),
            ("metrics", self.metrics),
            ("clocks", self.clocks),
            ("completion", self.completion),
        ]

    def gateway_is_ready(self) -> Finding:
        if not self.gateway:
            return skip("gateway", "no address")
        try:
            answer = self._get(self.gateway, "/ready")
        except httpx.HTTPError as error:
            return fail(
                "gateway",
                f"{self.gateway} does not answer: {_said(error)}",
                "is it there, and not behind a firewall?",
            )
        if answer.status_code == 200:
            return ok("gateway", f"{self.gateway} is ready")
        return fail(
            "gateway",
            f"{self.gateway}/ready answers {answer.status_code}",
            "no decode worker is ready, see below",
        )

    def workers(self) -> Iterator[Finding]:
        """By control's word: everybody is there, of one version, and learning has no trouble."""
        status = self._status()
        if isinstance(status, Finding):
            yield status
            return
        found: dict[str, list[dict[str, Any]]] = {}
        for worker in status["workers"]:
            found.setdefault(worker["role"], []).append(worker)
        for role in ("router", "gateway", "decode"):
            if not any(worker["state"] == "ready" for worker in found.get(role, [])):
                yield fail(
                    role,
                    f"none is ready: {found.get(role) or 'none is there'}",
                    f"the log of its node: `{role}`",
                )
        waiting = [w["id"] for w in status["workers"] if w["state"] == "starting"]
        if waiting:
            yield warn("workers", f"still starting: {', '.join(waiting)}", "wait; weights are loading")
        shown = ", ".join(f"{len(members)} {role}" for role, members in sorted(found.items()))
        yield ok("workers", shown)
        targets = {
            w["version"] for role in ("prefill", "decode") for w in found.get(role, []) if w["version"]
        }
        if len(targets) > 1:
            said = f"workers serve different targets: {', '.join(sorted(targets))}"
            yield fail("target", said, "one folder has other weights: the same model.target on every node")
        learning = status.get("learning") or {}
        for alarm in learning.get("alarms", ()):
            yield warn("learning", alarm, "docs/alerts.md, PacelineLearningTrouble")

    def _status(self) -> dict[str, Any] | Finding:
        if not self.control:
            return skip("control", "no address")
        try:
            answer = self._get(self.control, "/admin/api/status", self.admin_key)
        except httpx.HTTPError as error:
            return fail(
                "control",
                f"{self.control} does not answer: {_said(error)}",
                "requests go on without it; is its process there?",
            )
        if answer.status_code == 401:
            return fail(
                "control",
                f"{self.control} wants the admin key",
                "--admin-key, PACELINE_ADMIN_KEY, or the right PACELINE_HOME",
            )
        if answer.status_code != 200:
            return fail(
                "control",
                f"{self.control}/admin/api/status answers {answer.status_code}",
                "is this Paceline's control?",
            )
        status: dict[str, Any] = answer.json()
        return status

    def metrics(self) -> Finding:
        """A Prometheus would find every worker's figures there."""
        if not self.control:
            return skip("metrics", "no address")
        status = self._status()
        if isinstance(status, Finding):
            return skip("metrics", "control does not answer")
        answer = self._get(self.control, "/metrics", self.admin_key)
        silent = [w["id"] for w in status["workers"] if f'worker="{w["id"]}"' not in answer.text]
        if answer.status_code != 200 or silent:
            said = f"{self.control}/metrics ({answer.status_code}) has nothing of {', '.join(silent) or 'anybody'}"
            return fail("metrics", said, "they push each second: can they reach control over link.interface?")
        return ok("metrics", f"{answer.text.count(chr(10))} lines, of all {len(status['workers'])} processes")

    def clocks(self) -> Finding:
        """By the Date of an answer, which has whole seconds."""
        address = self.control or self.gateway
        if not address:
            return skip("clocks", "no address")
        try:
            date = self._get(address, "/health").headers.get("date", "")
        except httpx.HTTPError:
            return skip("clocks", f"{address} does not answer")
        if not date:
            return skip("clocks", f"{address} does not say what time it is")
        skew = time.time() - parsedate_to_datetime(date).timestamp()
        found = f"{address} is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} this machine"
        return ok("clocks", found) if abs(skew) <= _SKEW_S else warn("clocks", found, "run NTP on both")

    def completion(self) -> Finding:
        """One request twice: it is answered, and says the same."""
        if not self.gateway:
            return skip("completion", "no address")
        body = {
            "prompt": "Paceline's doctor asks: what is 12 + 30?",
            "max_tokens": 12,
            "seed": 7,
            "store": False,
        }
        answers, seconds = [], []
        for _ in range(2):
            began = time.monotonic()
            try:
                answer = httpx.post(
                    f"{self.gateway}/v1/completions",
                    json=body, headers=_bearer(self.api_key), timeout=_COMPLETION_S, trust_env=self._uses_proxy(self.gateway),
                )  # fmt: skip
            except httpx.HTTPError as error:
                return fail(
                    "completion", f"no answer: {_said(error)}", "`paceline status`: which worker is missing?"
                )
            seconds.append(time.monotonic() - began)
            if answer.status_code == 401:
                return fail(
                    "completion",
                    "the gateway wants an API key",
                    "--api-key, or PACELINE_API_KEY; `paceline keys create`",
                )
            if answer.status_code != 200:
                said = f"{answer.status_code}: {answer.text[:200]}"
                return fail("completion", said, "the gateway's log has this request: `request_done`")
            answers.append(answer.json())
        texts = [answer["choices"][0]["text"] for answer in answers]
        if texts[0] != texts[1]:
            return fail(
                "completion", f"the same request said {texts[0]!r} and {texts[1]!r}", "report it: it must not"
            )
        told = answers[0].get("metrics") or {}
        way = ", ".join(told.get("kv_source") or ["?"])
        tokens = answers[1]["usage"]["completion_tokens"]
        return ok("completion", f"{tokens} tokens in {1e3 * min(seconds):.0f} ms, twice the same; KV: {way}")

    def _get(self, address: str, path: str, key: str = "") -> httpx.Response:
        return httpx.get(
            f"{address}{path}", headers=_bearer(key), timeout=_TIMEOUT_S, trust_env=self._uses_proxy(address)
        )

    @staticmethod
    def _uses_proxy(address: str) -> bool:
        """Through a proxy of the environment, keys for this machine would leave it."""
        return not is_loopback(urlsplit(address).hostname or "")


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
