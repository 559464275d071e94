"""ClusterConfig and hosts -> files that Ray's own launcher takes, from one template, with room for every worker."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.config import load_config
from paceline.cluster.errors import ConfigError
from paceline.deploy.ray_cluster import Files, Host, cluster_yaml

ROOT = Path(__file__).resolve().parents[3]
HOSTS = (Host("10.0.0.11", ("prefill",)), Host("10.0.0.12", ("decode", "draft")))


def made(provider: str, *settings: str, hosts: tuple[Host, ...] = HOSTS) -> dict[str, Any]:
    text = cluster_yaml(load_config("cluster", settings), provider, files=Files(), hosts=hosts)  # type: ignore[arg-type]
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def offers(cluster: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Address -> resources, as a shell on that host would give them to `ray start`."""
    command = cluster["worker_start_ray_commands"][-1]
    found = re.findall(r"\*\" (\S+) \"\*\) address=(\S+); roles='([^']*)'", command)
    assert all(pattern == address for pattern, address, _ in found)
    return {address: json.loads(roles) for address, _, roles in found}


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster-onprem.yaml"])
def test_the_files_in_the_tree_are_the_template_filled_in(name: str) -> None:
    """By the command that stands in their second line; `make deploy-files` runs it."""
    text = (ROOT / "deploy" / name).read_text()
    command = text.splitlines()[1].removeprefix("#").strip()
    _, _, provider, *options = shlex.split(command)
    hosts = [Host.parse(options[at + 1]) for at, word in enumerate(options) if word == "--host"]

    again = cluster_yaml(
        load_config("cluster"),
        provider,  # type: ignore[arg-type]
        files=Files(),
        hosts=hosts,
        file_name=options[options.index("--out") + 1],
        command=command,
    )

    assert again == text


@pytest.mark.parametrize("provider", ["aws", "onprem"])
def test_ray_takes_the_file(provider: str) -> None:
    """By the launcher's own schema, after it has filled in what it knows of a provider."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(made(provider))

    validate_config(config)  # raises, and names what is wrong
    with pytest.raises(Exception, match="nonsense"):
        validate_config({**config, "nonsense": 1})


@pytest.mark.parametrize("provider", ["aws", "onprem"])
def test_ray_s_ports_are_closed_and_its_token_is_on(provider: str) -> None:
    config = made(provider)
    starts = [
        c
        for c in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"])
        if "ray start" in c
    ]

    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in c for c in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0] and "host=0.0.0.0" not in yaml.safe_dump(config)
    assert "~/.ray/auth_token" in config["file_mounts"]
    if provider == "aws":
        ports = [rule["FromPort"] for rule in config["provider"]["security_group"]["IpPermissions"]]
        assert ports == [8000]


def test_each_role_has_a_group_that_its_workers_fit() -> None:
    """On AWS nodes come when workers find no room, so a group must offer what a worker asks for, and nothing else may."""
    config = load_config(
        "cluster", ["decode.replicas=3", "decode.num_gpus=1", "prefill.replicas=0", "draft.max_per_node=2"]
    )
    types = yaml.safe_load(cluster_yaml(config, "aws", files=Files()))["available_node_types"]

    assert types.keys() == {"head", "decode", "draft"}
    assert types["decode"]["resources"] == config.decode.resources
    assert types["draft"]["resources"] == {"paceline_draft": 2}
    assert types["decode"]["max_workers"] >= 3 and types["decode"]["min_workers"] == 0
    assert types["decode"]["node_config"]["InstanceType"] != types["draft"]["node_config"]["InstanceType"]
    for section in (config.router, config.control, config.gateway):
        assert section.resources.keys() <= types["head"]["resources"].keys()


def test_there_is_room_for_as_many_as_there_may_be() -> None:
    types = made("aws", "decode.max_replicas=7", "draft.max_replicas=3", "draft.max_per_node=2")[
        "available_node_types"
    ]
    cluster = made("onprem", "decode.max_replicas=3")

    assert (types["decode"]["max_workers"], types["draft"]["max_workers"]) == (7, 2)
    assert offers(cluster)["10.0.0.12"]["paceline_decode"] == 3


def test_ranks_of_a_worker_find_room_together() -> None:
    types = made("aws", "decode.tp=2")["available_node_types"]

    assert types["decode"]["resources"] == {"paceline_decode": 2}


def test_hosts_offer_what_they_are_for() -> None:
    cluster = made("onprem", "decode.replicas=3", hosts=(*HOSTS, Host("10.0.0.13", ("decode",))))

    assert offers(cluster) == {
        "10.0.0.11": {"paceline_prefill": 1},
        "10.0.0.12": {"paceline_decode": 2, "paceline_draft": 1},
        "10.0.0.13": {"paceline_decode": 2},
    }
    assert cluster["provider"]["worker_ips"] == ["10.0.0.11", "10.0.0.12", "10.0.0.13"]


def test_all_hosts_are_in_use() -> None:
    """Ray's second autoscaler leaves one host out for ever; the first counts them right: see ray_up/test_ray_up.py."""
    cluster = made("onprem")

    assert cluster["min_workers"] == cluster["max_workers"] == 2
    assert "RAY_enable_autoscaler_v2=0" in cluster["head_start_ray_commands"][1]
    assert "RAY_enable_autoscaler_v2" not in yaml.safe_dump(made("aws"))


def test_the_wheel_and_the_application_are_installed() -> None:
    cluster = made("onprem")

    assert any("pip install" in c and "wheels/paceline-" in c for c in cluster["setup_commands"])
    assert (
        cluster["head_start_ray_commands"][-1]
        == "paceline deploy --ray auto --config ~/paceline.yaml --no-wait"
    )
    assert cluster["file_mounts"]["~/paceline.yaml"] == "deploy/presets/cluster.yaml"


@pytest.mark.parametrize(
    "settings, hosts, words",
    [
        ((), HOSTS[:1], "--host decode=ADDRESS: expected, since decode.replicas=1"),
        ((), (*HOSTS, Host("10.0.0.14", ("decoder",))), "'decoder' has no workers; expected some of prefill"),
        (("draft.replicas=0",), HOSTS, "'draft' has no workers"),
        ((), (*HOSTS, Host("10.0.0.12", ("decode",))), "10.0.0.12: given twice"),
        (
            ("decode.resources={gpu_node: 1}",),
            HOSTS,
            "decode.resources={'gpu_node': 1.0}: expected paceline_decode",
        ),
        (("decode.replicas=3", "decode.max_per_node=2"), HOSTS, "decode.max_per_node=2: 1 hosts are too few"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(
    settings: tuple[str, ...], hosts: tuple[Host, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        made("onprem", *settings, hosts=hosts)

    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["10.0.0.12", "decode=somewhere", "decode=", "decode"])
def test_a_host_is_roles_and_an_address(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an IP address"):
        Host.parse(text)
