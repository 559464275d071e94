"""Presets, files, settings and the environment -> a config, or an error that names field, value and range."""

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paceline.cluster.config import (
    ClusterConfig,
    Secrets,
    Section,
    find_config,
    load_config,
    model_folder,
    presets,
)
from paceline.cluster.errors import ConfigError


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """`section.field` of everything that can be set."""
    for section, info in ClusterConfig.model_fields.items():
        yield from fields_of(section, info.annotation)


def fields_of(path: str, section: object) -> Iterator[tuple[str, FieldInfo]]:
    """Those of one section and of the sections in it."""
    assert isinstance(section, type) and issubclass(section, Section)
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fields_of(f"{path}.{name}", field.annotation)
        else:
            yield f"{path}.{name}", field


def limits(field: FieldInfo) -> dict[str, float]:
    names = ("ge", "gt", "le", "lt")
    return {name: getattr(item, name) for item in field.metadata for name in names if hasattr(item, name)}


def outside() -> Iterator[tuple[str, Any, dict[str, float]]]:
    """For every number: one value below its range, one above, and both ends."""
    for name, field in fields():
        ends = limits(field)
        if ends:
            yield name, ends["ge"] - 1 if "ge" in ends else ends["gt"], ends
            yield name, ends["le"] + 1, ends


def at(config: ClusterConfig, name: str) -> Any:
    return operator.attrgetter(name)(config)


def error_of(*settings: str, source: str | Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, settings)
    return str(caught.value)


# --- ranges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value, ends", list(outside()))
def test_a_value_out_of_range_is_named_with_its_range(name: str, value: Any, ends: dict[str, float]) -> None:
    """The message says which field, which value, which end it passed, both ends and the default."""
    message = error_of(f"{name}={value}")

    low = ends.get("ge", ends.get("gt"))
    assert message.startswith(f"{name}={value!r}: expected ")
    assert f"(legal: {low}..{ends['le']}, default {at(ClusterConfig(), name)})" in message


@pytest.mark.parametrize(
    "name, field", [(n, f) for n, f in fields() if limits(f)], ids=[n for n, f in fields() if limits(f)]
)
def test_the_ends_of_a_range_are_legal(name: str, field: FieldInfo) -> None:
    """The range that an error names can be used to its last value."""
    ends = limits(field)
    for value in (end for bound, end in ends.items() if bound in ("ge", "le")):
        # A peer must be silent for two pings before it is dead: the two fields move together.
        other = {"link.ping_s": "link.dead_s=600", "link.dead_s": "link.ping_s=0.05"}.get(name)
        assert at(load_config(None, [f"{name}={value}", *([other] if other else [])]), name) == value


def test_a_peer_cannot_be_dead_before_two_pings() -> None:
    """A rule over two fields names both and the bound."""
    assert error_of("link.dead_s=1.5") == "link.dead_s=1.5: expected at least 2 * link.ping_s = 2.0"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_and_a_limit_per_node_do_not_go_together(role: str) -> None:
    """Ray Serve refuses it later, in other words; one of them is fine."""
    expected = f"{role}.tp=2: expected 1 with {role}.max_per_node=1, or {role}.max_per_node=0"

    assert error_of(f"{role}.tp=2", f"{role}.max_per_node=1").startswith(expected)
    load_config(None, [f"{role}.tp=2"])
    load_config(None, [f"{role}.max_per_node=1"])


@pytest.mark.parametrize(
    "settings", [("decode.replicas=3", "decode.max_replicas=2"), ("draft.replicas=0", "draft.max_replicas=2")]
)
def test_there_are_at_most_as_many_as_at_least(settings: tuple[str, str]) -> None:
    """And a role that scales has somebody to begin with."""
    role = settings[0].partition(".")[0]

    assert error_of(*settings).startswith(
        f"{role}.max_replicas=2: expected 0 (there are always {role}.replicas), or"
    )
    assert load_config(None, [f"{role}.max_replicas=2"]).decode.peak_replicas == (
        2 if role == "decode" else 1
    )


def test_every_number_has_two_ends() -> None:
    """An `int` or `float` without a range would accept what no worker can live with."""
    open_ended = [n for n, f in fields() if f.annotation in (int, float) and len(limits(f)) != 2]

    assert not open_ended


@pytest.mark.parametrize(
    "setting, start",
    [
        ("decode.threads=many", "decode.threads='many': "),
        ("decode.threads=1.5", "decode.threads=1.5: "),
        ("decode.threads=", "decode.threads=None: "),
        ("link.ping_s=.nan", "link.ping_s=nan: "),
        ("link.ping_s=.inf", "link.ping_s=inf: "),
        ("gateway.port=http", "gateway.port='http': "),
    ],
)
def test_a_number_that_is_none_is_named_with_its_range(setting: str, start: str) -> None:
    """Words, fractions of an int, nothing, nan and inf are refused like any other value."""
    message = error_of(setting)

    assert message.startswith(start)
    assert "(legal: " in message and ", default " in message


@pytest.mark.parametrize(
    "setting", ["speculation.enabled=maybe", "model.name=12", "model.target=[a]", "decode=3"]
)
def test_a_value_of_another_type_is_named(setting: str) -> None:
    """Fields without a range still say what they are, what they got and what they expect."""
    name = setting.partition("=")[0]

    assert error_of(setting).startswith(f"{name}=") and ": expected " in error_of(setting)


@pytest.mark.parametrize("name", ["decode.thread", "nonsense", "nonsense.deep.down", "kv.block_size_"])
def test_an_unknown_field_is_an_error_and_not_a_silent_nothing(name: str) -> None:
    """A misspelt name says that it is unknown, and where all names are listed."""
    message = error_of(f"{name}=1")

    assert message.startswith(tuple({name, name.split(".")[0]})) and "unknown field" in message


def test_all_errors_are_told_at_once() -> None:
    """One line for each wrong value: nobody wants to find them one by one."""
    message = error_of("decode.threads=0", "kv.block_size=3", "link.nope=1")

    assert [line.split(":")[0] for line in message.splitlines()] == [
        "decode.threads=0",
        "link.nope",
        "kv.block_size=3",
    ]


@pytest.mark.parametrize(
    "value",
    ["[nobody]", "[draft, nobody]", "[draft, draft]", "[]", "draft", "[1]", "[[draft]]", "{draft: 1}", ""],
)
def test_sources_that_do_not_exist_or_come_twice_are_named_with_those_that_do(value: str) -> None:
    """Field, value, and every legal name."""
    message = error_of(f"speculation.sources={value}")

    assert message.startswith("speculation.sources=") and message.endswith(
        ": expected a list of one or more of draft, suffix, each once"
    )


@pytest.mark.parametrize("sources", [["draft"], ["suffix"], ["suffix", "draft"], ["draft", "suffix"]])
def test_sources_keep_the_order_they_are_asked_in(sources: list[str]) -> None:
    """As a setting and in a file."""
    setting = f"speculation.sources=[{', '.join(sources)}]"

    assert load_config(None, [setting]).speculation.sources == sources


# --- settings, files and presets ------------------------------------------------------------------------


def test_every_field_can_be_set_and_read_back() -> None:
    """Each field of each section is reachable as `section.field=value`; its default is a legal value."""
    default = ClusterConfig()
    for name, _ in fields():
        assert load_config(None, [f"{name}={at(default, name)}"]) == default, name
    assert len(list(fields())) > 40


def test_every_section_says_what_it_is() -> None:
    """Sections and ranged numbers of the shared base are described where they are declared."""
    for section, info in ClusterConfig.model_fields.items():
        assert info.annotation is not None and info.annotation.__doc__, section


@pytest.mark.parametrize(
    "value", ["collector:4318", "ftp://collector", "http://user:secret@collector", "http://"]
)
def test_where_traces_go_is_a_url_without_secrets(value: str) -> None:
    """The configuration is shown to operators; a collector's key comes from the environment."""
    with pytest.raises(ConfigError, match="telemetry.otlp_endpoint=.*expected none, or a URL"):
        load_config(None, [f"telemetry.otlp_endpoint={value}"])
    assert load_config(None, ["telemetry.otlp_endpoint=https://collector:4318/x"]).telemetry.otlp_endpoint


@pytest.mark.parametrize(
    "setting, name, value",
    [
        ("decode.threads=2", "decode.threads", 2),
        (" decode.threads = 2", "decode.threads", 2),
        ("speculation.enabled=false", "speculation.enabled", False),
        ("speculation.max_wait_ms=7.5", "speculation.max_wait_ms", 7.5),
        ("model.target=/some/where=else", "model.target", "/some/where=else"),
        ('model.name="12"', "model.name", "12"),
    ],
)
def test_a_setting_is_parsed_as_yaml(setting: str, name: str, value: Any) -> None:
    """Numbers, booleans, quoted strings; only the first equals sign divides."""
    found = at(load_config(None, [setting]), name)

    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("setting", ["decode.threads", "=3", "", " =1", "decode.threads=["])
def test_a_setting_that_cannot_be_read_is_quoted(setting: str) -> None:
    """The message shows what was given and, where it helps, what it should look like."""
    assert error_of(setting).startswith(f"--set {setting!r}: ")


def test_a_setting_below_a_value_is_refused() -> None:
    """Going through a number as if it were a section says which name is none."""
    assert "threads is not a section" in error_of("decode.threads=2", "decode.threads.more=1")


def test_later_settings_win_over_earlier_ones_and_over_the_file(tmp_path: Path) -> None:
    """File first, then the settings in their order; what neither names keeps its default."""
    file = tmp_path / "mine.yaml"
    file.write_text("decode: {threads: 3, max_streams: 7}\nkv: {block_size: 32}\n")
    config = load_config(file, ["decode.threads=4", "decode.threads=5"])

    assert (config.decode.threads, config.decode.max_streams, config.kv.block_size) == (5, 7, 32)
    assert config.prefill == ClusterConfig().prefill


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_loads_by_name(name: str) -> None:
    """Every bundled file is a legal config, found by its stem and by its path."""
    assert load_config(name) == load_config(presets()[name])


def test_the_laptop_preset_spells_out_the_defaults() -> None:
    """Without a file the cluster is the laptop's."""
    assert load_config("laptop") == load_config(None) == ClusterConfig()


@pytest.mark.parametrize(
    "content, part",
    [
        (b"- a\n- b\n", "expected sections such as `decode:`, got list"),
        (b"decode: [", "cannot be read as YAML"),
        (b"\xff\xfe\x00\x80", "cannot be read as YAML"),
        (b"42", "got int"),
        (b"1: 2\n", "1=1: "),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    """Whatever is in the file, the error is ours and says what was expected."""
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)

    assert part in error_of(source=file)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    """Nothing said, nothing changed."""
    file = tmp_path / "empty.yaml"
    file.write_text("# later\n")

    assert load_config(file) == ClusterConfig()


def test_a_name_that_is_neither_preset_nor_file_lists_the_presets() -> None:
    """The next try can be right."""
    with pytest.raises(ConfigError, match="'desktop'.*no preset of that name.*laptop"):
        find_config("desktop")


def test_a_config_is_frozen() -> None:
    """Derived values are never written back into what was configured."""
    with pytest.raises(ValidationError, match="frozen"):
        ClusterConfig().decode.threads = 2


def test_model_folders_are_found_by_path_and_by_bundled_name(tmp_path: Path) -> None:
    """A folder counts if it has a config.json; an unknown one is named with the place that was searched."""
    (tmp_path / "config.json").write_text("{}")

    assert model_folder(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(ConfigError, match="'no/such': no config.json there, nor among the bundled"):
        model_folder("no/such")


# --- secrets --------------------------------------------------------------------------------------------


def test_the_link_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 hex digits are the 32 bytes that all hosts of a shared cluster use."""
    monkeypatch.setenv("PACELINE_LINK_SECRET", "0f" * 32)

    assert Secrets.create().link == b"\x0f" * 32


def test_without_environment_every_start_has_its_own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 random bytes, never the same twice."""
    monkeypatch.delenv("PACELINE_LINK_SECRET", raising=False)

    first, second = Secrets.create().link, Secrets.create().link
    assert len(first) == len(second) == 32 and first != second


@pytest.mark.parametrize("given", ["secret words", "0f" * 31, "0f" * 33, "0g" * 32, "0"])
def test_a_secret_of_another_shape_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The message names the variable and what it should hold, never what it held."""
    monkeypatch.setenv("PACELINE_LINK_SECRET", given)
    with pytest.raises(ConfigError, match="PACELINE_LINK_SECRET: expected .*hex digits") as caught:
        Secrets.create()

    assert given == "0" or given not in str(caught.value)


def test_a_printed_secret_shows_nothing() -> None:
    """Neither repr nor str nor an f-string tells a byte of it."""
    text = Secrets(link=b"open sesame 0123456789 abcdefghi")
    shown = f"{text!r} {text!s} {text} {[text]}"

    assert "sesame" not in shown and "link" not in shown
