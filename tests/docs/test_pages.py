"""The pages -> whole: every field, command and metric is there, links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs_site import blocks, made

import client_environments
from paceline.cluster.config import ClusterConfig, check_config, load_config
from paceline.cluster.errors import ConfigError
from paceline.cluster.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
BLOCKS = [block for page, text in PAGES.items() for block in blocks.blocks_of(page, text)]


# --- commands and configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_block_says_what_it_needs(block: blocks.Block) -> None:
    """Commands run in CI or say what is missing there; what is no block of commands holds none."""
    block.check()


@pytest.mark.parametrize(
    ("info", "body", "message"),
    [
        ("console", "$ paceline stop", "expected `run`"),
        ("console run needs=gpu", "$ paceline stop", "expected `run`"),
        ("console run=moon", "$ paceline stop", "run=moon"),
        ("console needs=luck", "$ paceline stop", "needs=luck"),
        ("console run", "paceline stop", "begins with"),
        ("bash", "paceline stop", "'bash'"),
        ("", "paceline stop", "''"),
        ("text", "  kubectl get pods", "is a command"),
        ("json config", "{}", "expected nothing"),
    ],
)
def test_a_block_that_says_nothing_is_refused(info: str, body: str, message: str) -> None:
    block = next(blocks.blocks_of("page.md", f"words\n\n```{info}\n{body}\n```\n"))

    with pytest.raises(blocks.BlockError, match=message):
        block.check()


def test_commands_and_what_they_print_are_told_apart() -> None:
    text = "1. x\n\n    ```console run\n    $ one \\\n    >   two\n    out\n    ...\n    $ three\n    ```\n"
    block = next(blocks.blocks_of("page.md", text))

    assert block.commands == (blocks.Command("one \\\n  two", ("out", "...")), blocks.Command("three", ()))
    assert block.where == "page.md:3" and block.run == ""


def test_readers_see_what_is_needed_and_no_marks() -> None:
    shown = blocks.for_readers(
        "page.md", "```console needs=gpu,hosts\n$ x\n```\n```console run=cluster\n$ y\n```\n"
    )

    assert '```console title="Needs a GPU and several hosts"\n' in shown and "```console\n$ y" in shown


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.marks == ("config",)], ids=lambda block: block.where
)
def test_every_configuration_is_one(block: blocks.Block) -> None:
    """As `--config` would read it."""
    import yaml

    assert isinstance(check_config(yaml.safe_load(block.body)), ClusterConfig)


def test_a_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        check_config({"decode": {"threadz": 2}})


def test_every_command_that_pages_name_exists() -> None:
    """`paceline WORDS` anywhere in a page, and `make VERB`."""
    known = {words.removeprefix("paceline ") for words, _ in made.commands()}
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, text in PAGES.items():
        for found in re.finditer(r"(?:`|\$ |\$\()paceline ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", text):
            words = (
                found[1] if found[1] not in ("keys", "drafts") or not found[2] else f"{found[1]} {found[2]}"
            )
            assert words in known, f"{page}: paceline {words}"
        for found in re.finditer(r"(?:`|\$ )make ([a-z-]+)", text):
            assert found[1] in verbs, f"{page}: make {found[1]}"


def test_clients_are_named_with_the_versions_that_are_run() -> None:
    """The page's table and the environments in which tests run other people's clients."""
    rows = [line for line in PAGES["reference/clients.md"].splitlines() if line.startswith("| `")]
    for name, recipe in client_environments.RECIPES.items():
        package, version = (
            recipe.steps[-1][1].split("[")[0].split("==")[0],
            recipe.steps[-1][1].split("==")[1],
        )
        assert any(row.startswith(f"| `{package}` | {version} |") for row in rows), name


# --- completeness ------------------------------------------------------------------------------------------


def test_every_field_has_a_row_and_words() -> None:
    """The table is made from the tree of the configuration; a field without words would stand there without."""
    table = made.knobs()

    for path, section in made.sections_of(ClusterConfig):
        assert f"\n## `{path}` {{#{path}}}\n" in f"\n{table}", path
        for name, _ in made.fields_of(section, path):
            row = next((line for line in table.splitlines() if f'id="{name}"' in line), "")
            assert len(row.split(" | ")[-1]) > 8, f"{name}: {row}"
    leaves = len(re.findall(r'<code id="', table))
    assert leaves == len(list(_leaves(load_config(None).model_dump(), "")))


def _leaves(tree: dict[str, object], path: str) -> list[str]:
    found = []
    for name, value in tree.items():
        is_section = isinstance(value, dict) and name not in ("resources",)
        found += _leaves(value, f"{path}.{name}") if is_section else [f"{path}.{name}"]  # type: ignore[arg-type]
    return found


def test_every_command_and_option_is_in_the_reference() -> None:
    text = made.cli()

    for words, command in made.commands():
        assert f"# `{words}`\n" in text, words
        section = text.split(f"# `{words}`\n")[1].split("\n#")[0]
        for parameter in command.params:
            if parameter.name not in ("help", "context"):
                name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper()
                assert f"`{name}`" in section, f"{words} {name}"


@pytest.mark.skipif("metrics.md" not in PAGES, reason="docs/metrics.md is not written yet")
def test_every_metric_is_in_the_catalogue() -> None:
    for family in Metrics().registry.collect():
        assert f"`{family.name}" in PAGES["metrics.md"], family.name


def test_every_metric_that_pages_name_exists() -> None:
    """A figure that was renamed would be looked for in vain."""
    known = {family.name for family in Metrics().registry.collect()}
    for page, text in PAGES.items():
        for name in re.findall(r"\bpaceline_[a-z_]+\b", text):
            base = re.sub(r"_(total|bucket|count|sum)$", "", name)
            if base not in ROLES_AND_RESOURCES:
                assert base in known or name in known, f"{page}: {name}"


ROLES_AND_RESOURCES = {
    f"paceline_{role}" for role in ("control", "gateway", "prefill", "decode", "draft", "trainer")
}


def test_every_operation_and_schema_is_in_the_api_references() -> None:
    for document, text in ((made.gateway_document(), made.http()), (made.admin_document(), made.admin())):
        for path, operations in document["paths"].items():
            for method in operations:
                assert f"### `{method.upper()} {path}`" in text
        for name, schema in document["components"]["schemas"].items():
            assert f"{{#schema-{name.lower()}}}" in text
            for field in schema.get("properties", {}):
                assert f"| `{field}` |" in text, f"{name}.{field}"


def test_files_that_pages_name_are_there() -> None:
    """Of the techniques above all: where it is, its twin, its test."""
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:cluster|workers|kernels|deploy|tests|helm)/[\w./-]+\.\w+)`", text):
            assert (ROOT / path).is_file(), f"{page}: {path}"


def test_every_technique_names_its_place_and_its_test() -> None:
    rows = [
        line.split(" | ")
        for line in PAGES["techniques.md"].splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    rows = [row for row in rows if row[0] != "| technique"]

    assert len(rows) > 30
    for row in rows:
        assert len(row) == 5 and row[3] and "`" in row[2] and "`tests/" in row[4], row[0]


# --- the site ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning is an error. It leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Tags(HTMLParser):
    """What a page links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.policies: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given and tag != "meta"}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.loads.append(given["href"])
        elif tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(given["content"])
        elif "src" in given:
            self.loads.append(given["src"])
        if "style" in given:
            self.loads += re.findall(r"url\(['\"]?([^'\")]+)", given["style"])


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    """Each link of each page leads to a file and an anchor that are there; each thing loaded is part of the site."""
    pages: dict[Path, Tags] = {}
    for path in site.rglob("*.html"):
        pages[path] = Tags()
        pages[path].feed(path.read_text())

    assert len(pages) > len(PAGES) and (site / "reference" / "openapi.json").is_file()
    assert json.loads((site / "reference" / "admin-openapi.json").read_text())["openapi"].startswith("3.")
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        assert page.policies and "default-src 'self'" in page.policies[0]
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert link not in page.loads or parts.scheme == "data", f"{path.name} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)} -> {link}"
            if parts.fragment and target in pages:
                known = pages[target].ids
                assert unquote(parts.fragment) in known, f"{path.relative_to(site)} -> {link}"
    for style in site.rglob("*.css"):
        for url in re.findall(r"url\(['\"]?([^'\")]+)|@import", style.read_text()):
            assert not urlsplit(url).netloc, f"{style.name}: {url}"


@pytest.mark.slow
def test_what_is_made_from_code_is_in_the_built_pages(site: Path) -> None:
    """No marker is left, and each page has what it asked for."""
    for path in site.rglob("*.html"):
        assert "made:" not in path.read_text(), path
    assert 'id="decode.token_budget"' in (site / "operate" / "knobs.html").read_text()
    assert "paceline drafts delete-data" in (site / "reference" / "cli.html").read_text()
    assert "<svg" in (site / "index.html").read_text()
    python = (site / "reference" / "python.html").read_text()
    for name in ("Engine", "Drafter", "Match", "Controller", "load_config"):
        assert f".{name}" in python, name
