"""A configuration -> what follows from it and why; where it places workers and what their sockets bind to."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.config import ClusterConfig, load_config, model_folder
from paceline.cluster.errors import ConfigError
from paceline.deploy import local
from paceline.deploy.placement import engine_placement, link_address
from paceline.deploy.resolved import check_ranks, derived, settings
from paceline.workers.model_runner import load_runner


def values(*changes: str) -> dict[str, tuple[str, str]]:
    """Name -> (value, reason)."""
    config = load_config(None, changes)
    return {d.name: (d.value, d.reason) for d in derived(config, config)}


@pytest.mark.parametrize(
    "changes, name, value, reason",
    [
        ((), "streams at once", "128", "64 running + 64 waiting"),
        (("decode.replicas=2", "decode.max_queue=8"), "streams at once", "144", "2 decode x"),
        (("decode.max_replicas=3",), "streams at most", "384", "decode.max_replicas=3"),
        ((), "API keys", "off", "127.0.0.1"),
        (("gateway.auth=keys",), "API keys", "needed", "gateway.auth=keys"),
        (("limits.max_context=512",), "context", "512 tokens", "limits.max_context=512"),
        (("limits.max_context=9999",), "context", "2048 tokens", "the model's 2048"),
        (("decode.kv_memory_mb=2",), "context", "672 tokens", "672 in a decode worker's KV"),
        (("prefill.replicas=0",), "prompts", "decode workers", "prefill.replicas=0"),
        (("speculation.enabled=false",), "drafts", "off", "speculation.enabled=false"),
        (("draft.replicas=0",), "drafts", "suffix", "draft.replicas=0"),
        (("link.interface=node",), "links bind to", "node", "Ray knows"),
        (("decode.tp=2",), "decode KV", "4096 blocks", "96 MB on each of 2 ranks / 24576 bytes a block"),
        (("decode.tp=4",), "decode KV", "4096 blocks", "96 MB on each of 4 ranks / 24576 bytes a block"),
    ],
)
def test_every_derived_value_has_its_reason(
    changes: tuple[str, ...], name: str, value: str, reason: str
) -> None:
    """What a user would otherwise have to work out."""
    found = values(*changes)

    assert found[name][0] == value and reason in found[name][1]


def test_the_pools_are_as_large_as_the_workers_make_them() -> None:
    """Worked out here from config.json, there from the loaded model."""
    config = ClusterConfig()
    for role, model, engine in (
        ("decode", config.model.target, config.decode),
        ("draft", config.model.draft, config.draft),
    ):
        runner, _ = load_runner(
            model_folder(model), kv_memory_mb=engine.kv_memory_mb, block_size=config.kv.block_size
        )
        assert values()[f"{role} KV"][0] == f"{runner.cache.num_blocks} blocks"


def test_a_port_that_was_taken_for_0_is_told() -> None:
    """The configuration as given has the 0, the one that runs the port."""
    given = load_config(None, ["gateway.port=0"])
    running = given.model_copy(update={"gateway": given.gateway.model_copy(update={"port": 4321})})

    assert ("gateway.port", "4321") in [(d.name, d.value) for d in derived(given, running)]
    assert settings(given) == {"gateway.port": 0}


@pytest.mark.parametrize(
    "interface, address",
    [("127.0.0.1", "127.0.0.1"), ("node", "10.9.0.7"), ("10.1.0.0/16", "10.1.2.3"), ("::1", "::1"), ("fd00::/8", "fd00::5")],
)  # fmt: skip
def test_links_bind_to_one_address_of_the_node(interface: str, address: str) -> None:
    """An address, Ray's own for this node, or the node's one in a network."""
    config = load_config(None, [f"link.interface='{interface}'"])
    local_addresses = ["127.0.0.1", "10.9.0.7", "10.1.2.3", "fd00::5"]

    assert link_address(config.link.interface, "10.9.0.7", local_addresses) == address


def test_a_node_outside_the_network_says_so() -> None:
    """Better than binding to another interface."""
    with pytest.raises(ConfigError, match=r"link.interface=10.2.0.0/16.*127.0.0.1"):
        link_address("10.2.0.0/16", "127.0.0.1", ["127.0.0.1"])


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "0.0.0.0/0", "eth0", "", "localhost"])
def test_links_never_bind_to_all_interfaces(interface: str) -> None:
    """Nor to a name that could stand for anything."""
    with pytest.raises(ConfigError, match="link.interface"):
        load_config(None, [f"link.interface='{interface}'"])


def test_placement_options_are_those_of_the_configuration() -> None:
    """GPUs, custom resources and a bound for each node; the bound only if there is one."""
    config = load_config(
        None,
        ["decode.replicas=3", "decode.num_gpus=1", "decode.resources={big: 0.5}", "decode.max_per_node=1"],
    )
    options = engine_placement(config.decode, config.scaling)

    assert options["num_replicas"] == 3 and options["max_replicas_per_node"] == 1
    assert options["ray_actor_options"] == {"num_cpus": 0.25, "num_gpus": 1.0, "resources": {"big": 0.5}}
    assert "max_replicas_per_node" not in engine_placement(config.prefill, config.scaling)
    assert local.needed_resources(config) == {"big": 2.0}


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"decode.replicas": 2, "decode.max_per_node": 1}, "decode.max_per_node=1"),
        ({"gateway.replicas": 2}, "gateway.replicas=2"),
    ],
)
def test_what_needs_several_nodes_is_refused_on_one_machine(change: dict[str, Any], complaint: str) -> None:
    """It would wait for a node that never comes."""
    config = load_config(None, [f"{name}={value}" for name, value in change.items()])
    with pytest.raises(ConfigError, match=complaint):
        local.check_fits_one_node(config)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_that_cannot_share_the_target_are_refused_before_anything_starts(role: str) -> None:
    """The bundled target has 8 attention heads and 2 KV heads."""
    for tp in (1, 2, 4, 8):
        check_ranks(load_config(None, [f"{role}.tp={tp}"]))

    with pytest.raises(ConfigError, match=rf"{role}\.tp=3: expected a divisor of .*num_attention_heads=8"):
        check_ranks(load_config(None, [f"{role}.tp=3"]))
    check_ranks(load_config(None, ["prefill.tp=3", "prefill.replicas=0"]))


def test_a_role_that_scales_has_bounds_instead_of_a_number() -> None:
    config = load_config(None, ["decode.max_replicas=3", "decode.resources={big: 1}"])
    options = engine_placement(config.decode, config.scaling)

    assert "num_replicas" not in options
    assert (options["autoscaling_config"]["min_replicas"], options["autoscaling_config"]["max_replicas"]) == (
        1,
        3,
    )
    assert local.needed_resources(config) == {"big": 3.0}  # one machine has room for all that may come


def test_ranks_of_a_worker_are_packed_on_one_node_and_counted() -> None:
    """A bundle for each; what a section asks for is for each rank."""
    settings = ("decode.tp=2", "decode.num_cpus=0.5", "decode.resources={blue: 2}", "decode.replicas=3")
    one, two = load_config(None, ["decode.num_cpus=0.5", "decode.replicas=3"]), load_config(None, settings)
    placed = engine_placement(two.decode, two.scaling)

    assert placed["placement_group_bundles"] == [{"CPU": 0.5, "blue": 2.0}] * 2
    assert placed["placement_group_strategy"] == "STRICT_PACK"
    assert "placement_group_bundles" not in engine_placement(one.decode, one.scaling)
    assert local.needed_cpus(two) == local.needed_cpus(one) + 1.5
    assert local.needed_resources(two)["blue"] == 12.0
