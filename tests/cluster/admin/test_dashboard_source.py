"""dashboard/ -> the bundle in cluster/admin/static: built from just this source, and fit for a strict policy."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "dashboard"
BUNDLE = ROOT / "cluster" / "admin" / "static"
INPUTS = (
    "index.html",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "vite.config.ts",
    "public",
    "src",
)
"""What the bundle depends on; vite.config.ts hashes the same files in the same way."""


def source_hash(source: Path) -> str:
    """Of all inputs, in order of their paths."""
    found = [source / name for name in INPUTS]
    files = [
        file for path in found for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()
    ]
    digest = hashlib.sha256()
    for path in sorted(file.relative_to(source).as_posix() for file in files):
        digest.update(path.encode() + b"\0" + (source / path).read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_bundle_is_built_from_this_source() -> None:
    """The bundle is committed, so that nobody needs Node to run it: it must not be older than its source."""
    stamp = (BUNDLE / "source.sha256").read_text().strip()

    assert stamp == source_hash(SOURCE), "the bundle is stale: run `make dashboard`"


def test_another_source_has_another_hash(tmp_path: Path) -> None:
    """Negative control: one character, or one file more, is seen."""
    for name in ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"):
        (tmp_path / name).write_text(name)
    (tmp_path / "public").mkdir()
    (tmp_path / "src" / "pages").mkdir(parents=True)
    page = tmp_path / "src" / "pages" / "overview.tsx"
    page.write_text("a")
    hashes = {source_hash(tmp_path)}
    page.write_text("b")
    hashes.add(source_hash(tmp_path))
    (tmp_path / "src" / "more.ts").write_text("")
    hashes.add(source_hash(tmp_path))

    assert len(hashes) == 3


def test_the_page_names_files_that_are_there_and_nothing_from_elsewhere() -> None:
    """Hashed names only, no other host, no inline script or style: the policy forbids all of it."""
    page = (BUNDLE / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert len(named) >= 3
    for name in named:
        assert name.startswith("/admin/"), name
        assert (BUNDLE / name.removeprefix("/admin/")).is_file(), name
    assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son\w+=", page)
    kept = {path.name for path in (BUNDLE / "assets").iterdir()}
    assert kept == {name.rpartition("/")[2] for name in named if "/assets/" in name}, (
        "left from another build"
    )


def test_the_script_asks_no_other_host() -> None:
    """Addresses in the bundle are names of XML spaces and of a library's own help, none that is called."""
    hosts = set()
    for path in (BUNDLE / "assets").iterdir():
        hosts |= set(re.findall(r"https?://([a-z0-9.-]+)", path.read_text()))

    assert hosts <= {"www.w3.org", "react.dev", "localhost"}, hosts
    assert all("eval(" not in path.read_text() for path in (BUNDLE / "assets").glob("*.js"))
