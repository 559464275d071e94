"""ClusterConfig -> what `serve deploy` reads and back: one tree, whichever way it comes to a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.config import check_config, load_config, over_preset
from paceline.cluster.errors import ConfigError
from paceline.deploy import local
from paceline.deploy.serve_config import IMPORT_PATH, check_links, read_args, serve_config

CHANGES = ("decode.replicas=3", "prefill.replicas=0", "speculation.depth=4", "gateway.max_body_bytes=4194304")


def app(*settings: str, admin: bytes = b"") -> dict[str, Any]:
    found: dict[str, Any] = serve_config(load_config("cluster", settings), admin=admin)["applications"][0]
    return found


def test_what_comes_out_is_what_went_in() -> None:
    config = load_config("cluster", CHANGES)

    back, admin = read_args(app(*CHANGES, admin=bytes(range(32)))["args"])

    assert admin == bytes(range(32))
    assert back == config.model_copy(update={"decode": config.decode.model_copy(update={"replicas": 1})})


def test_how_many_there_are_is_said_apart() -> None:
    """Serve restarts replicas whose arguments change; a role that is not there at all stays an argument."""
    before, after = app(), app("decode.replicas=3")

    assert before["args"] == after["args"]
    assert {"name": "decode", "num_replicas": 3} in after["deployments"]
    assert "prefill" not in {d["name"] for d in app(*CHANGES)["deployments"]}
    assert app(*CHANGES)["args"]["config"]["prefill"]["replicas"] == 0


def test_between_how_many_is_said_apart_as_well() -> None:
    """Other bounds restart nobody; without `max_replicas` all is as it was."""
    before, after = app(), app("decode.max_replicas=3", "scaling.busy=0.5")
    (decode,) = [d for d in after["deployments"] if d["name"] == "decode"]

    assert before["args"] == after["args"]
    assert "num_replicas" not in decode
    assert (decode["autoscaling_config"]["min_replicas"], decode["autoscaling_config"]["max_replicas"]) == (
        1,
        3,
    )
    assert [d for d in after["deployments"] if d["name"] != "decode"] == [
        d for d in before["deployments"] if d["name"] != "decode"
    ]


def test_every_name_in_it_is_one_of_ours() -> None:
    """The import path is a function, the deployments are those that `build_app` makes."""
    import importlib

    from paceline.deploy import replicas

    module, _, name = IMPORT_PATH.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    for deployment in app()["deployments"]:
        assert hasattr(replicas, f"{deployment['name'].capitalize()}Replica")


@pytest.mark.parametrize(
    "args, words",
    [
        ({"config": {"decode": {"replicas": 0}}}, "decode.replicas=0: expected >= 1"),
        ({"config": {"decodes": {}}}, "decodes: unknown field"),
        ({"config": {"preset": "huge"}}, "preset='huge': expected one of cluster, laptop"),
        ({"config": "cluster"}, "args.config='cluster': expected sections"),
        ({"config": {}, "admin": "secret"}, "args.admin: expected the SHA-256"),
        ({"config": {}, "admin": "ab"}, "args.admin: expected the SHA-256"),
        ({"config": {}, "admin": 5}, "args.admin: expected the SHA-256"),
        ({"confg": {}}, "args.confg: expected `config`"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_args(args)

    assert words in str(refused.value)


def test_a_tree_stands_on_its_preset() -> None:
    """Sections are merged, a field's value is replaced: a mapping in a field as well."""
    laid = over_preset({"preset": "cluster", "gateway": {"port": 9000}, "decode": {"resources": {"mine": 1}}})
    config = check_config({"preset": "cluster", "learning": {"train": {"max_steps": 5}}})

    assert laid["gateway"] == {
        "host": "0.0.0.0",
        "drain_s": 60,
        "resources": {"paceline_gateway": 0.001},
        "port": 9000,
    }
    assert laid["decode"]["resources"] == {"mine": 1}
    assert config.learning.train.max_steps == 5 and config.link.interface == "node"
    assert over_preset({"decode": {}}) == {"decode": {}}


def test_a_file_may_name_its_preset(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: cluster\ndecode: {threads: 3}\n")

    config = load_config(path, ["decode.replicas=2"])

    assert (config.decode.threads, config.decode.replicas, config.link.interface) == (3, 2, "node")


def test_one_machine_offers_what_the_preset_asks_for() -> None:
    """`paceline serve --preset cluster` would wait for ever for a role without room."""
    config = load_config("cluster")
    asked = {
        name
        for section in (
            config.router,
            config.control,
            config.gateway,
            config.prefill,
            config.decode,
            config.draft,
        )
        for name in section.resources
    }

    assert len(asked) == 5 and local.needed_resources(config).keys() == asked


@pytest.mark.parametrize(
    "interface, nodes, words", [("127.0.0.1", 2, "a loopback address"), ("10.0.0.1", 3, "one node's")]
)
def test_links_must_reach_other_nodes(interface: str, nodes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"link.interface={interface}: {words}.*expected `node`"):
        check_links(load_config(None, [f"link.interface={interface}"]), nodes)


@pytest.mark.parametrize("interface, nodes", [("node", 3), ("10.0.0.0/8", 3), ("127.0.0.1", 1)])
def test_links_that_do_are_fine(interface: str, nodes: int) -> None:
    check_links(load_config(None, [f"link.interface={interface}"]), nodes)
