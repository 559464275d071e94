"""Command line -> a running cluster, its state, its measurements, its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from paceline.cluster.admin.key import VARIABLE, ensure_admin_key, read_admin_key
from paceline.cluster.config import (
    ClusterConfig,
    ControlConfig,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    load_config,
    model_folder,
    presets,
)
from paceline.cluster.errors import ConfigError, PacelineError
from paceline.cluster.keys import is_loopback
from paceline.cluster.model_files import check_model_files
from paceline.cluster.pair import check_pair
from paceline.deploy import clusters, drafts, keys, local, resolved, tls
from paceline.deploy.doctor.main import doctor

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Serve a large model at a small model's pace: exact speculation on a Ray cluster.",
    pretty_exceptions_enable=False,
)
app.add_typer(keys.commands, name="keys")
app.add_typer(drafts.commands, name="drafts")
app.command()(clusters.deploy)
app.command()(clusters.drain)
app.command()(clusters.cluster_yaml)
app.command()(doctor)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Name = Annotated[str, typer.Option(help="Name of the local cluster; several can run side by side.")]
Preset = Annotated[str | None, typer.Option(help="A bundled preset.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A YAML file with the same sections as a preset.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")]
START_LIMIT_S = 240.0


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    try:
        app()
    except PacelineError as error:
        err.print(f"paceline: {error}", style="red", markup=False)
        raise SystemExit(2) from None


@app.command()
def serve(
    preset: Preset = None,
    config: ConfigFile = None,
    settings: Settings = None,
    port: Annotated[
        int | None, typer.Option(help="Short for --set gateway.port=N; 0 takes a free one.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; end with `paceline stop`.")
    ] = False,
    name: Name = "local",
) -> None:
    """Start a whole cluster on this machine and say when it is ready."""
    extra = [] if port is None else [f"gateway.port={port}"]
    given = _load(preset, config, [*(settings or []), *extra])
    final = _with_free_ports(given)
    local.check_fits_one_node(final)
    target, draft = model_folder(final.model.target), model_folder(final.model.draft)
    check_model_files(target)
    if final.speculation.enabled and final.draft.replicas and "draft" in final.speculation.sources:
        check_model_files(draft)
        check_pair(target, draft)
    folder = local.run_folder(name)
    running = local.read_state(folder)
    if running is not None and local.processes_of(running["run_id"]):
        raise ConfigError(
            f"cluster {name!r} is running; `paceline stop{_suffix(name)}` ends it, --name starts another"
        )
    for section, listener in (("gateway", final.gateway), ("control", final.control)):
        tls.certificate_of(listener.tls, section)
    keys.check_gateway(final.gateway)  # refuses a listener that is open to others by mistake
    resolved.check_learning(final)
    resolved.check_ranks(final)
    ensure_admin_key(local.admin_key_path())
    _print_plan(given, final)
    run_id = _launch(folder, final)
    try:
        _wait_until_ready(folder, final, run_id)
    except BaseException:
        _stop_run(folder)
        raise
    _print_ready(final, name, local.read_state(folder) or {}, detach)
    if not detach:
        _follow(folder, run_id)


@app.command()
def stop(name: Name = "local") -> None:
    """End the cluster: all of its processes, and nothing else on the machine."""
    folder = local.run_folder(name)
    if local.read_state(folder) is None:
        out.print(f"no cluster {name!r} is running")
        return
    began = time.monotonic()
    with out.status("stopping: workers finish their streams first"):
        _stop_run(folder)
    out.print(f"stopped in {time.monotonic() - began:.1f} s; no process is left")


@app.command()
def status(
    name: Name = "local", as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show every worker of the cluster."""
    state = local.read_state(local.run_folder(name))
    processes = local.processes_of(state["run_id"]) if state is not None else []
    if state is None or not processes:
        raise PacelineError(f"no cluster {name!r} is running; `paceline serve` starts one")
    report: dict[str, Any] = {
        "phase": state["phase"],
        "gateway": state["gateway"],
        "control": state["control"],
    }
    try:
        report.update(
            httpx.get(
                f"{state['control']}/admin/api/status",
                headers=operator_headers(state),
                timeout=5.0,
                verify=tls.trust(local.certificate(state, "control")),
            )
            .raise_for_status()
            .json()
        )
    except httpx.HTTPError as error:
        report.update(workers=[], error=f"control does not answer: {error}")
    report["processes"] = len(processes)
    report["resident_mb"] = local.resident_bytes(processes) >> 20
    if as_json:
        print(json.dumps(report))
        return
    table = Table(title=f"{report.get('model', '')} at {report['gateway']}", title_justify="left")
    for column in ("worker", "node", "state", "pid", "version", "streams", "KV blocks"):
        table.add_column(column, no_wrap=True)
    for worker in report["workers"]:
        used, free = worker["kv_blocks_used"], worker["kv_blocks_free"]
        blocks = f"{used} of {used + free}" if used + free else ""
        keys = ("id", "node", "state", "pid", "version", "streams")
        table.add_row(*(str(worker[key]) for key in keys), blocks)
    wide = out if out.is_terminal else Console(highlight=False, width=160)  # in a pipe names must be whole
    wide.print(table)
    out.print(f"{report['phase']}; {report['processes']} processes, {report['resident_mb']} MB resident")
    learning = report.get("learning") or {}
    if learning:
        live = f"; {learning['live']} drafts" if learning["live"] else ""
        out.print(f"learning: {learning['state']}: {learning['reason']}{live}", markup=False)
        for alarm in learning["alarms"]:
            out.print(f"alarm: {alarm}", style="red", markup=False)


bench_app = typer.Typer(add_completion=False)
app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="domains, unseen, copy, random; repeatable, all by default. With --gpu parts of names of kernels' rows, or steps."
        ),
    ] = None,
    streams: Annotated[
        list[int] | None,
        typer.Option(help="Streams at once; repeatable; 1, 4 and 16 by default, over HTTP 64 as well."),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Alternated pairs for each ratio; a figure wants 30.")] = 30,
    quick: Annotated[bool, typer.Option(help="About a minute; says that it is not a figure.")] = False,
    target: Annotated[
        str, typer.Option(help="Model folder, or the name of a bundled one.")
    ] = ModelConfig().target,
    draft: Annotated[str, typer.Option(help="The same for the draft.")] = ModelConfig().draft,
    threads: Annotated[int, typer.Option(help="Threads of the engine; 0 measures which number is best.")] = 0,
    peers: Annotated[
        bool, typer.Option(help="Also run `transformers` on the same weights and prompts.")
    ] = True,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead: other engines in their own Pythons, `all` that `make peers` has built, or NAME, or "
            "NAME=PYTHON for transformers, vllm and llamacpp; repeatable."
        ),
    ] = None,
    http: Annotated[
        bool,
        typer.Option(
            "--http", help="Instead: a whole cluster over HTTP against the engine with equal threads."
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Instead: this machine's GPU, kernels against floors and libraries, steps of an 8B's shape.",
        ),
    ] = False,
    settings: Settings = None,
    out_file: Annotated[Path | None, typer.Option("--json", help="Also write the JSON object here.")] = None,
) -> None:
    """Measure the engine on this machine: a card, one table of ratios, one line of JSON."""
    if context.invoked_subcommand is not None:
        return
    # Imports torch, which reads its threads' environment once: hence here, after that was set.
    from paceline.deploy.bench import main as bench_main

    if gpu:
        from paceline.deploy.bench import gpu as bench_gpu

        result = bench_gpu.run(only=scenario or (), quick=quick, json_path=out_file)
    elif http:
        result = bench_main.run_http(
            target=target,
            draft=draft,
            scenarios=scenario,
            streams=tuple(streams or (1, 4, 16, 64)),
            pairs=pairs,
            quick=quick,
            threads=threads,
            settings=settings or (),
            json_path=out_file,
        )
        if result["complaints"] or result["exactness"]["mismatches"]:
            raise SystemExit(1)
    elif peer:
        result = bench_main.run_peers(
            peer,
            target=target,
            draft=draft,
            scenarios=scenario,
            streams=tuple(streams or (1, 4, 16)),
            pairs=pairs,
            quick=quick,
            threads=threads,
            json_path=out_file,
        )
    else:
        result = bench_main.run(
            target=target,
            draft=draft,
            scenarios=scenario,
            streams=tuple(streams or (1, 4, 16)),
            pairs=pairs,
            quick=quick,
            threads=threads,
            peers=peers,
            json_path=out_file,
        )
    if result.get("interrupted"):
        raise SystemExit(130)


@bench_app.command("faults")
def bench_faults(
    streams: Annotated[int, typer.Option(help="Streams at once under each fault.")] = 16,
    kills: Annotated[int, typer.Option(help="Faults of each row.")] = 2,
    only: Annotated[
        str, typer.Option(help="Rows whose name begins so, such as decode or draft.mid_step.")
    ] = "",
    soak_requests: Annotated[
        int, typer.Option("--soak", help="Instead: so many mixed requests, then what was left behind.")
    ] = 0,
    out_file: Annotated[Path | None, typer.Option("--json", help="Also write the JSON object here.")] = None,
    settings: Settings = None,
) -> None:
    """Kill every role in every phase under running streams: a recovery table and one line of JSON."""
    from paceline.deploy.bench import faults, soak
    from paceline.deploy.bench.report import console

    def say(text: str) -> None:
        err.print(f"  {text}", markup=False, soft_wrap=True)

    how: dict[str, Any] = {"settings": settings or (), "out": console(), "say": say}
    if soak_requests:
        found = soak.run(requests=soak_requests, **how)
    else:
        found = faults.run(streams=streams, kills=kills, only=only, **how)
    if out_file is not None:
        out_file.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))
    if found["complaints"]:
        raise SystemExit(1)


@bench_app.command("learn")
def bench_learn(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of capture, swap, guard, shift, stationary, gate, replay; separated by commas, or repeated."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Small sizes: every part runs, no figure decides anything.")
    ] = False,
    work: Annotated[
        Path | None, typer.Option(help="Keep texts and drafts here, for the next run to go on with.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--json", help="Also write the JSON object here.")] = None,
    settings: Settings = None,
) -> None:
    """Measure the learning loop on this machine: what it gains, what it costs, what the gate lets through."""
    from paceline.deploy.bench.learn import main as learn

    learn.run(
        parts=[part.strip() for some in only for part in some.split(",")] if only else learn.PARTS,
        quick=quick,
        work=work,
        settings=settings or (),
        json_path=out_file,
    )


@app.command()
def profile(
    preset: Preset = None,
    config: ConfigFile = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option(help="Fewer points and repeats, under 20 s.")] = False,
    out_file: Annotated[
        Path, typer.Option("--out", help="Where the JSON goes; an older profile there is replaced.")
    ] = Path("paceline-profile.json"),
) -> None:
    """Measure what planning needs: step times, prefill, drafts, threads and a KV link on this machine."""
    # Imports torch, which reads its threads' environment once: hence here, after that was set.
    from paceline.deploy.profile import main as profile_main

    profile_main.run(_load(preset, config, settings or []), out_file, quick=quick)


@app.command()
def explain() -> None:
    """List every configuration field with its default and meaning."""
    for name, section in ClusterConfig.model_fields.items():
        out.print(f"[bold]{name}[/bold]")
        _explain_section(name, section.annotation)
    out.print(f"presets: {', '.join(presets())}")


def _explain_section(path: str, section: object) -> None:
    assert isinstance(section, type) and issubclass(section, BaseModel)
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            _explain_section(f"{path}.{name}", field.annotation)
            continue
        out.print(f"  {path}.{name} = {field.default!r}", style="cyan", markup=False)
        if text := " ".join((field.description or "").split()):
            out.print(f"      {text}", markup=False)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(package_version("paceline"))


# --- serve, in parts ------------------------------------------------------------------------------------


def _load(preset: str | None, config: Path | None, settings: list[str]) -> ClusterConfig:
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config: give one of them")
    return load_config(config or preset or "laptop", settings)


def _with_free_ports(config: ClusterConfig) -> ClusterConfig:
    """Replace port 0 by a free one and refuse one in use: better here than from inside a replica."""
    gateway = config.gateway.model_copy(
        update={"port": _free_port(config.gateway.host, config.gateway.port, "gateway")}
    )
    control = config.control.model_copy(
        update={"port": _free_port(config.control.host, config.control.port, "control")}
    )
    return config.model_copy(update={"gateway": gateway, "control": control})


def _free_port(host: str, port: int, section: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{section}.host={host} {section}.port={port}: {error.strerror}; "
                f"--set {section}.port=0 takes a free one"
            ) from None
        return int(probe.getsockname()[1])


def _launch(folder: Path, config: ClusterConfig) -> str:
    """Start the supervisor in a session of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex
    state = {
        "run_id": run_id,
        "phase": "launching",
        "gateway": _url(config.gateway),
        "control": _url(config.control),
        "config": config.model_dump(mode="json"),
    }
    local.write_state(folder, state)
    with (folder / "supervisor.log").open("w") as log:
        subprocess.Popen(
            [sys.executable, "-m", "paceline.deploy.local", str(folder)],
            env={**os.environ, local.RUN_VARIABLE: run_id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return run_id


def _wait_until_ready(folder: Path, config: ClusterConfig, run_id: str) -> None:
    """Show which part is being waited for until the gateway says ready and all workers are there."""
    began = time.monotonic()
    wanted = config.prefill.replicas + config.decode.replicas + config.draft.replicas + config.has_trainer
    last = ""
    trusted = tls.trust(config.gateway.tls.cert, config.control.tls.cert)
    with out.status("starting") as spinner, httpx.Client(timeout=2.0, verify=trusted) as client:
        while True:
            state = local.read_state(folder) or {}
            text = _phase(client, state, wanted)
            if not text:
                return
            if text != last and not out.is_terminal:
                out.print(f"  {time.monotonic() - began:4.0f} s  {text}")
            last = text
            spinner.update(f"{text} ({time.monotonic() - began:.0f} s)")
            dead = not local.processes_of(run_id) and time.monotonic() - began > 2.0
            if state.get("phase") == "failed" or dead or time.monotonic() - began > START_LIMIT_S:
                reason = state.get("error") or (
                    "it ended" if dead else f"not ready after {START_LIMIT_S:.0f} s"
                )
                tail = "\n".join((folder / "supervisor.log").read_text(errors="replace").splitlines()[-15:])
                raise PacelineError(
                    f"the cluster did not start: {reason}\n{tail}\nlog: {folder / 'supervisor.log'}"
                )
            time.sleep(0.2)


def _phase(client: httpx.Client, state: dict[str, Any], wanted: int) -> str:
    """What is still missing, in a few words; empty when nothing is."""
    if state.get("phase") != "running":
        return str(state.get("phase", "launching"))
    try:
        if client.get(f"{state['gateway']}/ready").status_code != 200:
            return "waiting for a decode worker"
        status = client.get(f"{state['control']}/admin/api/status", headers=operator_headers(state))
        workers = status.raise_for_status().json()["workers"]
    except (httpx.HTTPError, ValueError):
        return "waiting for the gateway and control"
    ready = [
        w for w in workers if w["role"] in ("prefill", "decode", "draft", "trainer") and w["state"] == "ready"
    ]
    return "" if len(ready) >= wanted else f"{len(ready)} of {wanted} workers ready"


def operator_headers(state: dict[str, Any]) -> dict[str, str]:
    """What Control wants to see where others can reach it: there even its status needs the admin key."""
    if is_loopback(str(state["config"]["control"]["host"])):
        return {}
    key = read_admin_key(local.admin_key_path())
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _stop_run(folder: Path) -> None:
    """End a run by its processes and remove its state."""
    state = local.read_state(folder)
    if state is None:
        return
    processes = local.processes_of(state["run_id"])
    supervisors = [p for p in processes if "paceline.deploy.local" in " ".join(_command(p))]
    local.end_processes(supervisors, 40.0)  # it drains and ends the rest
    local.end_processes(local.processes_of(state["run_id"]), 3.0)
    (folder / "state.json").unlink(missing_ok=True)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _follow(folder: Path, run_id: str) -> None:
    """Stay in the foreground until Ctrl-C or the end of the cluster."""
    try:
        while local.processes_of(run_id):
            time.sleep(1.0)
        raise PacelineError(f"the cluster ended by itself; log: {folder / 'supervisor.log'}")
    except KeyboardInterrupt:
        with out.status("stopping"):
            _stop_run(folder)
        out.print("stopped")


# --- what is shown --------------------------------------------------------------------------------------


def _print_plan(given: ClusterConfig, config: ClusterConfig) -> None:
    """The configuration that will run: the workers, what was set, and what follows with its reason."""
    table = Table(title=f"Paceline {package_version('paceline')}", title_justify="left", show_edge=False)
    for column in ("role", "replicas", "threads", "model"):
        table.add_column(column)
    rows: list[tuple[str, EngineConfig]] = [
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("draft", config.draft),
    ]
    if config.has_trainer:
        rows.append(("trainer", config.trainer))
    for role, engine in rows:
        model = config.model.draft if role in ("draft", "trainer") else config.model.target
        table.add_row(role, str(engine.replicas), str(engine.threads), model)
    out.print(table)
    changed = ", ".join(f"{name}={value}" for name, value in resolved.settings(given).items())
    out.print(f"set: {changed or 'nothing; all defaults'}", markup=False)
    follows = Table(show_edge=False, box=None)
    for column in ("derived", "value", "because"):
        follows.add_column(column)
    for item in resolved.derived(given, config):
        follows.add_row(item.name, item.value, item.reason)
    cpus = f"{local.needed_cpus(config):.2f} of {os.cpu_count() or 1}"
    follows.add_row("CPU shares", cpus, "sum of num_cpus: for placement only, not a limit")
    out.print(follows)


def _print_ready(config: ClusterConfig, name: str, state: dict[str, Any], detach: bool) -> None:
    url, seconds = state.get("gateway", ""), state.get("start_seconds", 0.0)
    out.print(
        f"[green]ready[/green] in {seconds:.0f} s: {url}/v1   metrics: {state.get('control', '')}/metrics"
    )
    where = VARIABLE if os.environ.get(VARIABLE) else local.admin_key_path()
    out.print(f"dashboard: {state.get('control', '')}/admin   its key: {where}", markup=False, soft_wrap=True)
    messages = [{"role": "user", "content": "Write a Python function `read_file`."}]
    body = json.dumps({"model": config.model.name, "stream": True, "messages": messages})
    lines = (
        f"  curl -N {url}/v1/chat/completions \\",
        "    -H 'content-type: application/json' \\",
        f"    -d '{body}'",
    )
    for line in lines:  # to be copied: never wrapped
        out.print(line, markup=False, soft_wrap=True)
    out.print(f"`paceline stop{_suffix(name)}` ends it" if detach else "Ctrl-C ends it")


def _suffix(name: str) -> str:
    return "" if name == "local" else f" --name {name}"


def _url(section: GatewayConfig | ControlConfig) -> str:
    host = f"[{section.host}]" if ":" in section.host else section.host
    return f"{'https' if section.tls.is_on else 'http'}://{host}:{section.port}"


if __name__ == "__main__":
    main()
