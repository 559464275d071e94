"""Command line -> Paceline on a Ray cluster that runs already, and the file with which `ray up` makes one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from paceline.cluster.admin.key import ensure_admin_key, hash_key
from paceline.cluster.config import load_config
from paceline.cluster.errors import ConfigError, PacelineError
from paceline.deploy import leave, local, ray_cluster, ray_deploy
from paceline.deploy.serve_config import serve_config

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Preset = Annotated[str | None, typer.Option(help="A bundled preset; `cluster` if nothing is said.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="A YAML file with the same sections as a preset; `preset: cluster` in it lays it over that one."
    ),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")]


def deploy(
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Ray's dashboard, http://HOST:8265; auto: this machine's."
        ),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    settings: Settings = None,
    show: Annotated[
        bool, typer.Option("--print", help="Only print what `serve deploy` reads, in YAML.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Return when everything runs, or say what does not.")] = True,
    limit_s: Annotated[float, typer.Option(help="How long to wait for that.")] = 900.0,
    patience_s: Annotated[
        float, typer.Option(help="How long to try an address where nothing answers.")
    ] = 60.0,
) -> None:
    """Deploy on a Ray cluster that runs already, or change what is deployed there without breaking a stream."""
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config: give one of them")
    checked = load_config(config or preset or "cluster", settings or [])
    if show:
        yaml.safe_dump(serve_config(checked), sys.stdout, sort_keys=False)
        return
    if ray is None:
        raise ConfigError("--ray: expected http://HOST:8265, where Ray's dashboard is, or auto")
    url, token = ray_deploy.dashboard_url(ray), ray_deploy.ray_token()
    admin = hash_key(ensure_admin_key(local.admin_key_path()))

    def say(text: str) -> None:
        err.print(f"  {text}", markup=False, soft_wrap=True)

    with ray_deploy.RayCluster(url, token, say=say) as cluster:
        cluster.deploy(serve_config(checked, admin=admin), patience_s=patience_s)
        if not wait:
            out.print(
                f"handed to Ray at {url}; the same command without --no-wait says when it runs",
                soft_wrap=True,
            )
            return
        cluster.wait_until_running(limit_s=limit_s)
    gateway, control = checked.gateway, checked.control
    out.print(
        f"[green]running[/green]: every gateway listens on port {gateway.port}, Control on {control.host}:{control.port}"
    )
    out.print(f"the key of its dashboard: {local.admin_key_path()}", markup=False, soft_wrap=True)


def drain(
    node: Annotated[
        str, typer.Argument(help="As `paceline status` shows it: HOST/ID; by default the one this runs on.")
    ] = "",
    limit_s: Annotated[float, typer.Option(min=1, max=86400, help="Until then it has to be empty.")] = 300.0,
) -> None:
    """Empty a node of the Ray cluster before its host is serviced: its workers move, streams go on.

    Run it on that host: only there it keeps `ray up` from starting Ray again; elsewhere, on any node.
    """
    nodes = leave.RayNodes()
    node_id = leave.find(nodes.all(), nodes.here, node)

    def say(text: str) -> None:
        err.print(f"  {text}", markup=False, soft_wrap=True)

    if node_id in nodes.here and leave.stay_away(local.home()):
        say(f"Ray starts here again once you `touch {local.home() / leave.JOINS}`")
    if left := leave.leave(nodes, node_id, limit_s, say):
        raise PacelineError(f"after {limit_s:.0f} s still there: {', '.join(left)}")
    out.print("drained: nothing of Paceline runs there, and Ray places nothing there any more")


def cluster_yaml(
    provider: Annotated[str, typer.Argument(help="aws, or onprem for machines of your own.")],
    preset: Preset = None,
    config: ConfigFile = None,
    head: Annotated[str, typer.Option(help="onprem: address of the head.")] = "10.0.0.10",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="onprem: ROLE=ADDRESS or ROLE+ROLE=ADDRESS, repeatable: which workers a host has room for."
        ),
    ] = None,
    ssh_user: Annotated[str, typer.Option(help="onprem: who may log in on all hosts.")] = "ubuntu",
    ssh_key: Annotated[str, typer.Option(help="onprem: with this private key.")] = ray_cluster.Files.ssh_key,
    wheel: Annotated[str, typer.Option(help="Paceline's wheel; by default in dist/.")] = "",
    name: Annotated[str, typer.Option(help="Of the cluster.")] = "paceline",
    file: Annotated[
        Path | None, typer.Option("--out", help="Write it there instead of to the screen.")
    ] = None,
) -> None:
    """Write the file with which `ray up` makes a cluster: one group of nodes, or one host, for each role."""
    if provider not in ("aws", "onprem"):
        raise ConfigError(f"provider {provider!r}: expected aws or onprem")
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config: give one of them")
    source = config or preset or "cluster"
    files = ray_cluster.Files(
        config=str(config or f"deploy/presets/{source}.yaml"), wheel=wheel, ssh_key=ssh_key
    )
    text = ray_cluster.cluster_yaml(
        load_config(source),
        "aws" if provider == "aws" else "onprem",
        files=files,
        head=head,
        hosts=[ray_cluster.Host.parse(item) for item in host or []],
        ssh_user=ssh_user,
        name=name,
        file_name=str(file or "cluster.yaml"),
        command=shlex.join(["paceline", *sys.argv[1:]]),
    )
    if file is None:
        print(text, end="")
    else:
        file.write_text(text)
