"""`paceline drafts ...` -> Control's admin API -> tables: drafts that learn, what was decided about them, what to do.

Everything here is also a button of the dashboard and a JSON endpoint of the same name; all of it is audited there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cluster.admin.key import VARIABLE, read_admin_key
from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import ConfigError, PacelineError, RequestError, Unavailable
from paceline.cluster.keys import is_loopback
from paceline.deploy import local
from paceline.deploy.tls import trust

commands = typer.Typer(
    no_args_is_help=True, help="Drafts that learn: versions, runs, the ledger, and what to do about them."
)
out = Console(highlight=False)
_TIMEOUT_S = 30.0

Url = Annotated[str, typer.Option(help="Control's address; that of the local cluster by default.")]
Name = Annotated[str, typer.Option(help="Name of the local cluster.")]
Key = Annotated[
    str,
    typer.Option(
        help=f"Admin key; by default that of {VARIABLE}, else of admin.key in PACELINE_HOME.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="What the API answers, for programs.")]
Tag = Annotated[str, typer.Option(help="tenant:NAME or domain:NAME; everything else by default.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force = Annotated[bool, typer.Option(help="Although the gate refused it.")]
Why = Annotated[str, typer.Option("--reason", help="For the audit trail.")]
Limit = Annotated[int, typer.Option(min=1, max=200, help="Rows at most.")]
Version = Annotated[str, typer.Argument(help="As `list` shows it.")]


@dataclass(frozen=True)
class Api:
    """Control's JSON endpoints, as whoever has the admin key."""

    url: str
    key: str
    cert: str = "none"
    """A file with the certificate that Control shows, where no authority of the platform vouches for it."""

    def get(self, path: str, **query: Any) -> Any:
        """An endpoint's answer. See `send` for what it raises."""
        return self.send(
            "GET", path, params={name: value for name, value in query.items() if value not in ("", None)}
        )

    def act(self, action: str, **body: Any) -> dict[str, Any]:
        """Do something; fields that are empty are left out."""
        fields = {name: value for name, value in body.items() if value not in ("", None, False)}
        answer: dict[str, Any] = self.send("POST", f"actions/{action}", json=fields)
        return answer

    def send(self, method: str, path: str, **how: Any) -> Any:
        """An endpoint's answer to any method.

        Raises:
            Unavailable: nobody answers there, or what they need does not.
            RequestError: Control refuses; the message says why and what to do.
        """
        host = urlsplit(self.url).hostname or ""
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            # Through a proxy of the environment the key would leave the machine.
            verify, trusts_env = trust(self.cert), not is_loopback(host)
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=trusts_env, verify=verify) as client:
                answer = client.request(method, f"{self.url}/admin/api/{path}", headers=headers, **how)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(
                f"control at {self.url} does not answer: {error or type(error).__name__}; `paceline status` shows what "
                "runs, --url says where it is"
            ) from None
        try:
            content = answer.json() if answer.content else None
        except ValueError:
            content = None
        if answer.is_success and content is not None:
            return content
        raise _refusal(answer.status_code, content, self.url)


def _refusal(status: int, content: Any, url: str) -> PacelineError:
    """An answer that is no success, in words."""
    found = content.get("error") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        return Unavailable(
            f"{url} answers {status}, and not as a Paceline control does; --url says where it is"
        )
    message = str(found.get("message") or f"status {status}")
    advice = str(found.get("action") or "")
    if status == 401:
        advice = (
            f"give the key with --key or {VARIABLE}, or set PACELINE_HOME to that of who started the cluster: "
            "its admin.key is looked for there"
        )
    text = f"{message}; {advice}" if advice and advice != "see the message" else message
    if status == 503:
        return Unavailable(text)
    return RequestError(text, param=found.get("field"), code=found.get("code"), status=status)


def api_for(url: str, name: str, key: str) -> Api:
    """Where Control is, and the key that it wants.

    Raises:
        ConfigError: there is no key, or the address is none.
    """
    cert = "none"
    if not url:
        state = local.read_state(local.run_folder(name)) or {}
        cert = local.certificate(state, "control")
        default = ClusterConfig().control
        url = str(state.get("control") or f"http://{default.host}:{default.port}")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"--url {url!r}: expected an address such as http://127.0.0.1:8001")
    found = key or read_admin_key(local.admin_key_path())
    if not found:
        raise ConfigError(
            f"no admin key: give it with --key or {VARIABLE}; there is none in {local.admin_key_path()}, "
            "where `paceline serve` would have made one"
        )
    return Api(url.rstrip("/"), found, cert)


@commands.callback()
def connect(context: typer.Context, url: Url = "", name: Name = "local", key: Key = "") -> None:
    """Keep what says where Control is; it is looked for when a command needs it, and not for --help."""
    context.obj = (url, name, key)


def _api(context: typer.Context) -> Api:
    url, name, key = context.find_object(tuple) or ("", "local", "")
    return api_for(url, name, key)


# --- what is ----------------------------------------------------------------------------------------------


@commands.command()
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """What the loop does now and why, what is served, and what somebody should know."""
    found = _api(context).get("overview")
    if as_json:
        return _json(found)
    learning = found["learning"]
    paused = ", paused" if learning.get("is_paused") and learning["state"] != "paused" else ""
    _say(f"learning: {learning['state']}{paused}: {learning['reason']}")
    live, canary = found["live"], found["canary"]
    if live is not None:
        pinned = ", pinned" if live["pinned"] else ""
        _say(f"live: {live['version']} since {_time(live['since'])} by {live['by']}{pinned}")
    if canary is not None:
        share = f"{canary['share']:.0%} of {canary['tag'] or 'everything'}"
        _say(
            f"canary: {canary['version']}, {share}, {canary['num_drafted']} of {canary['min_requests']} drafted requests, "
            + (
                f"weak evidence: drafts were tried in {canary['num_drafted']} of {canary['num_requests']}"
                if canary["is_weak"]
                else f"saves {_interval(canary['saving'])}"
            )
        )
    for route in found["routes"]:
        _say(f"{route['tag']}: {route['version']}")
    for label, name in (("acceptance", "acceptance"), ("tokens per step", "tokens_per_step")):
        _say(
            f"{label}: {_number(found[name]['now'])} in the last minute, {_number(found[name]['hour'])} in the last hour"
        )
    _say(f"guard: {found['guard']['level']}: {found['guard']['reason']}")
    for alarm in found["alarms"]:
        hint = f"; {alarm['hint']}" if alarm.get("hint") else ""
        _say(f"{alarm['severity']}: {alarm['message']}{hint}")


@commands.command("list")
def show_all(
    context: typer.Context,
    state: Annotated[
        list[str] | None, typer.Option(help="candidate, rejected, canary, live, retired, ...; repeatable.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Only of tenant:NAME or domain:NAME; '' is everything else.")
    ] = None,
    query: Annotated[str, typer.Option(help="Text to look for in version, tag and reason.")] = "",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Versions, newest first."""
    # The empty tag is a filter too, and must not be left out.
    page = _api(context).get(
        "versions", state=state, q=query, limit=limit, **({} if tag is None else {"tag": [tag]})
    )
    if as_json:
        return _json(page)
    rows = (
        (
            item["version"], item["state"] + (", pinned" if item["pinned"] else ""), item["tag"] or "everything",
            item["parent"], _time(item["created"]), _interval(item["gate"] and item["gate"]["saving"]),
            _number(item["acceptance"]), _number(item["tokens_per_step"]), item["reason"],
        )
        for item in page["items"]
    )  # fmt: skip
    columns = (
        "version",
        "state",
        "for",
        "from",
        "made",
        "gate: saves",
        "acceptance",
        "tokens/step",
        "reason",
    )
    _table(columns, rows, empty="no versions; learning is off, or has not begun", page=page)


@commands.command()
def show(context: typer.Context, version: Version, as_json: AsJson = False) -> None:
    """All about one version: whose requests it learned from, what the gate said, its life."""
    found = _api(context).get(f"versions/{_part(version)}")
    if as_json:
        return _json(found)
    _facts(
        found,
        ("state", "reason", "tag", "parent", "run_id", "created", "target", "url", "sha256", "num_parameters", "num_bytes",
         "acceptance", "tokens_per_step", "num_requests", "data_from", "data_to"),
    )  # fmt: skip
    _table(
        ("tenant", "requests", "tokens"),
        ((row["tenant"], row["num_requests"], row["num_tokens"]) for row in found["trained_on"]),
        title="trained on",
    )
    if found["report"] is not None:
        _report(found["report"])
    _table(
        ("when", "state", "by", "reason"),
        ((_time(row["at"]), row["state"], row["who"], row["reason"]) for row in found["history"]),
        title="its life",
    )


@commands.command()
def gate(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="A version, or the run that made it.")],
    as_json: AsJson = False,
) -> None:
    """What the gate said of a candidate, with intervals and domains."""
    api = _api(context)
    try:
        report = api.get(f"reports/{_part(run)}")
    except RequestError as error:
        if error.status != 404:
            raise
        report = _report_of_run(api, run, error)
    if as_json:
        return _json(report)
    _report(report)


def _report_of_run(api: Api, run: str, error: RequestError) -> Any:
    """By the version that it made; what was said of the first attempt if there is no such run either."""
    try:
        version = api.get(f"runs/{_part(run)}")["result"]
    except RequestError as second:
        raise (error if second.status == 404 else second) from None
    if not version:
        raise RequestError(f"run {run} has made no version", status=404)
    return api.get(f"reports/{_part(version)}")


@commands.command()
def runs(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Runs of the trainer, newest first."""
    page = _api(context).get("runs", limit=limit)
    if as_json:
        return _json(page)
    rows = (
        (
            item["run_id"], item["kind"], item["state"], item["tag"] or "everything", item["why"], _time(item["created"]),
            f"{item['step']} of {item['num_steps']}", _number(item["loss"]), f"{item['cpu_s']:.0f}", item["result"],
            item["error"],
        )
        for item in page["items"]
    )  # fmt: skip
    columns = ("run", "kind", "state", "for", "why", "begun", "steps", "loss", "CPU s", "made", "error")
    _table(columns, rows, empty="no runs", page=page)


@commands.command()
def ledger(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Seconds that runs promised, brought and cost, and what was not done because it would not pay."""
    found = _api(context).get("ledger", limit=limit)
    if as_json:
        return _json(found)
    rows = (
        (
            row["run_id"], row["version"], row["tag"] or "everything", _time(row["at"]), _seconds(row["predicted_s"]),
            _seconds(row["realised_s"]) + ("..." if row["still_serving"] else ""), _seconds(row["spent_s"]),
        )
        for row in found["runs"]
    )  # fmt: skip
    columns = ("run", "version", "for", "when", "predicted s", "realised s", "spent s")
    _table(columns, rows, empty="no run has been accounted for")
    total = found["total"]
    _say(
        f"{total['num_runs']} runs: {_seconds(total['realised_s'])} s saved, {_seconds(total['spent_s'])} s spent, "
        f"net {_seconds(total['net_s'])} s"
    )
    _table(
        ("when", "decision", "for", "reason", "would save s", "would cost s"),
        (
            (_time(row["at"]), row["what"].replace("_", " "), row["tag"] or "everything", row["reason"],
             _seconds(row["expected_saving_s"]), _seconds(row["expected_cost_s"]))
            for row in found["decisions"]
        ),
        title="not done",
    )  # fmt: skip


@commands.command()
def audit(
    context: typer.Context,
    who: Annotated[str, typer.Option(help="Only of this actor.")] = "",
    action: Annotated[str, typer.Option(help="Only of this kind, such as promote.")] = "",
    query: Annotated[str, typer.Option(help="Text to look for.")] = "",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Who did what and when, also what was refused."""
    page = _api(context).get("audit", who=who, action=action, q=query, limit=limit)
    if as_json:
        return _json(page)
    rows = (
        (
            _time(row["at"]),
            row["who"],
            row["address"],
            row["action"],
            row["subject"],
            "yes" if row["ok"] else "no",
            row["detail"],
        )
        for row in page["items"]
    )
    _table(
        ("when", "who", "from", "action", "subject", "done", "detail"), rows, empty="nothing yet", page=page
    )


# --- what to do -------------------------------------------------------------------------------------------


@commands.command()
def train(context: typer.Context, tag: Tag = "", reason: Why = "", as_json: AsJson = False) -> None:
    """Begin a run now, or as soon as the guard lets it."""
    _act(context, as_json, "train", tag=tag, reason=reason)


@commands.command()
def forget(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="As `runs` shows it.")],
    yes: Yes = False,
    reason: Why = "",
    as_json: AsJson = False,
) -> None:
    """End a run; nothing of it is published."""
    _ask(yes, f"End run {run} and forget what it has learned?")
    _act(context, as_json, "forget", run_id=run, confirm=run, reason=reason)


@commands.command()
def pause(context: typer.Context, reason: Why = "", as_json: AsJson = False) -> None:
    """No run and no canary begins by itself, until `resume`."""
    _act(context, as_json, "pause", reason=reason)


@commands.command()
def resume(context: typer.Context, reason: Why = "", as_json: AsJson = False) -> None:
    """Runs and canaries begin by themselves again."""
    _act(context, as_json, "resume", reason=reason)


@commands.command()
def canary(
    context: typer.Context,
    version: Version,
    tag: Tag = "",
    force: Force = False,
    yes: Yes = False,
    reason: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give a version some of the streams, and compare."""
    _put_forward(context, as_json, "canary", version, tag, force, yes, reason)


@commands.command()
def promote(
    context: typer.Context,
    version: Version,
    tag: Tag = "",
    force: Force = False,
    yes: Yes = False,
    reason: Why = "",
    as_json: AsJson = False,
) -> None:
    """Make a version live."""
    _put_forward(context, as_json, "promote", version, tag, force, yes, reason)


def _put_forward(
    context: typer.Context,
    as_json: bool,
    action: str,
    version: str,
    tag: str,
    force: bool,
    yes: bool,
    reason: str,
) -> None:
    if force:
        _ask(yes, f"{action.capitalize()} {version} for {tag or 'everything'}, whatever the gate said of it?")
    confirm = version if force else ""
    _act(context, as_json, action, version=version, tag=tag, force=force, confirm=confirm, reason=reason)


@commands.command()
def pin(context: typer.Context, tag: Tag = "", reason: Why = "", as_json: AsJson = False) -> None:
    """Nothing automatic changes the version that is live now."""
    _act(context, as_json, "pin", tag=tag, reason=reason)


@commands.command()
def unpin(context: typer.Context, tag: Tag = "", reason: Why = "", as_json: AsJson = False) -> None:
    """The loop may replace the live version again."""
    _act(context, as_json, "unpin", tag=tag, reason=reason)


@commands.command()
def rollback(
    context: typer.Context, tag: Tag = "", yes: Yes = False, reason: Why = "", as_json: AsJson = False
) -> None:
    """End the canary if there is one, else go back to the version before."""
    what = tag or "everything"
    _ask(yes, f"Take the canary or live version of {what} back?")
    _act(context, as_json, "roll_back", tag=tag, confirm=what, reason=reason)


@commands.command()
def revoke(
    context: typer.Context, version: Version, yes: Yes = False, reason: Why = "", as_json: AsJson = False
) -> None:
    """Never serve a version again."""
    _ask(yes, f"Never serve {version} again? This cannot be taken back.")
    _act(context, as_json, "revoke", version=version, confirm=version, reason=reason)


@commands.command("delete-data")
def delete_data(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(help="All that was captured of this tenant.")] = "",
    request: Annotated[str, typer.Option(help="What was captured of the request with this id.")] = "",
    yes: Yes = False,
    reason: Why = "",
    as_json: AsJson = False,
) -> None:
    """Delete captured data from shards, reservoir, held-out set and the trainer's checkpoints."""
    if bool(tenant) == bool(request):
        raise ConfigError("delete-data: expected --tenant NAME or --request ID, one of them")
    what = f"tenant:{tenant}" if tenant else f"request:{request}"
    _ask(yes, f"Delete all that was captured of {what}? This cannot be taken back.")
    _act(context, as_json, "delete", tenant=tenant, request_id=request, confirm=what, reason=reason)


def _ask(yes: bool, question: str) -> None:
    """Once.

    Raises:
        typer.Exit: the answer is no.
    """
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        raise ConfigError("nothing was done: there is nobody to ask; --yes does not ask") from None
    if not agreed:
        _say("nothing was done")
        raise typer.Exit(1)


def _act(context: typer.Context, as_json: bool, action: str, **body: Any) -> None:
    result = _api(context).act(action, **body)
    _json(result) if as_json else _say(str(result["message"]))


# --- in words ---------------------------------------------------------------------------------------------


def _json(found: Any) -> None:
    print(json.dumps(found))


def _say(text: str) -> None:
    out.print(_plain(text), markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Names of domains come from clients: what would steer a terminal is not printed."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _part(text: str) -> str:
    """One part of a path, whatever it holds."""
    if text in (".", "..", ""):
        raise ConfigError(f"{text!r}: expected the name of a version or run")
    return quote(text, safe="")


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str = "",
    empty: str = "",
    page: Mapping[str, Any] | None = None,
) -> None:
    """Rows, or what to say where there are none; and how many there are besides."""
    lines = [[str(cell) for cell in row] for row in rows]
    if not lines:
        if empty:
            _say(empty)
        return
    table = Table(title=title or None, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place == 0)
    for line in lines:
        table.add_row(*(escape(_plain(cell)) for cell in line))
    # In a pipe names must be whole.
    is_set = out.is_terminal or "COLUMNS" in os.environ
    (out if is_set else Console(highlight=False, width=200)).print(table)
    if page is not None and page["total"] > len(lines):
        _say(f"{len(lines)} of {page['total']}; --limit shows more")


def _facts(found: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = found[name]
        if name in ("created", "data_from", "data_to"):
            value = _time(value)
        if value not in (None, ""):
            _say(
                f"{name.removeprefix('num_').replace('_', ' ')}: {_number(value) if isinstance(value, float) else value}"
            )


def _report(report: Mapping[str, Any]) -> None:
    verdict = "passed" if report["passed"] else "refused"
    _say(
        f"gate: {verdict}: {report['reason']} ({report['num_requests']} requests, {report['num_tokens']} tokens)"
    )
    _say(
        f"against {report['champion']}: saves {_interval(report['saving'])} of decode time, needs more than "
        f"{report['min_saving']:.1%}; slowdown {_number(report['slowdown'])}, at most {_number(report['max_slowdown'])}"
    )
    for label, name in (("acceptance", "acceptance"), ("tokens per step", "tokens_per_step")):
        _say(f"{label}: {_number(report[f'champion_{name}'])} -> {_number(report[f'candidate_{name}'])}")
    _table(
        ("domain", "requests", "saves", "passed"),
        (
            (
                row["domain"] or "(none)",
                row["num_requests"],
                _interval(row["saving"]),
                "yes" if row["passed"] else "no",
            )
            for row in report["domains"]
        ),
        title=f"by domain, none significantly below {report['domain_floor']:.1%}",
    )


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _interval(found: Mapping[str, float] | None) -> str:
    return "" if not found else f"{found['mean']:+.1%} ({found['lo']:+.1%} to {found['hi']:+.1%})"
