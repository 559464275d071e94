"""The dashboard's files over HTTP: caching by name, conditional requests, nothing but the bundle."""

import gzip
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.key import hash_key
from paceline.cluster.control import Control
from scripted_admin import KEY, client_of

SCRIPT = "console.log('paceline');\n" * 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle as the build makes it, and beside it what must not be served."""
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Paceline</title>")
    (folder / "assets" / "index-B1a2C3d4.js").write_text(SCRIPT)
    (folder / "favicon.svg").write_text("<svg/>")
    (folder / "source.sha256").write_text("abc")
    (folder / ".hidden.js").write_text("secret")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def page(make_control: Callable[..., Control], folder: Path) -> Callable[[], object]:
    app = build_admin_app(make_control(learning=False), hash_key(KEY), bundle=Bundle(folder))
    return lambda: client_of(app)


async def test_the_page_is_asked_for_anew_and_hashed_files_never(
    page: Callable[[], httpx.AsyncClient],
) -> None:
    """A new version of Paceline shows at once, and costs one small file otherwise."""
    async with page() as client:
        index = await client.get("/admin/")
        script = await client.get("/admin/assets/index-B1a2C3d4.js")
        icon = await client.get("/admin/favicon.svg")

    assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.headers["cache-control"] == icon.headers["cache-control"] == "no-cache"
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8" and script.text == SCRIPT
    assert "content-security-policy" in index.headers and icon.headers["content-type"] == "image/svg+xml"


async def test_what_a_browser_has_is_not_sent_again(page: Callable[[], httpx.AsyncClient]) -> None:
    """By ETag, packed or not, strong or made weak by a proxy."""
    async with page() as client:
        for coding in ("gzip", "identity"):
            first = await client.get("/admin/assets/index-B1a2C3d4.js", headers={"accept-encoding": coding})
            assert (first.headers.get("content-encoding") == "gzip") == (coding == "gzip")
            assert first.text == SCRIPT
            for tag in (first.headers["etag"], f'W/{first.headers["etag"]}, "other"', "*"):
                headers = {"accept-encoding": coding, "if-none-match": tag}
                again = await client.get("/admin/assets/index-B1a2C3d4.js", headers=headers)
                assert again.status_code == 304 and again.content == b""
                assert again.headers["etag"] == first.headers["etag"]
        other = await client.get("/admin/", headers={"if-none-match": '"other"'})
        assert other.status_code == 200


async def test_the_dashboard_s_own_addresses_are_the_page(page: Callable[[], httpx.AsyncClient]) -> None:
    """A reload of /admin/versions must not be a 404; a missing script must, and the API's paths are the API's."""
    async with page() as client:
        for path in ("/admin/versions", "/admin/versions/1a2b", "/admin/"):
            assert (await client.get(path)).text.startswith("<!doctype html>")
        for path in ("/", "/admin"):
            assert (await client.get(path)).headers["location"] == "/admin/"
        assert (await client.get("/admin/assets/gone-12345678.js")).status_code == 404
        assert (await client.get("/admin/api")).status_code == 401
        assert (await client.head("/admin/")).status_code == 200
        assert (await client.post("/admin/", json={})).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "assets/../../secret.txt", "/etc/passwd.txt", ".hidden.js",
     "source.sha256", "assets%5c..%5c..%5csecret.txt", "%00.txt"],
)  # fmt: skip
async def test_nothing_but_the_bundle_is_served(page: Callable[[], httpx.AsyncClient], path: str) -> None:
    """All files are in memory by their names: a path is never looked up on the disk."""
    async with page() as client:
        answer = await client.get(f"/admin/{path}")

    assert answer.status_code in (401, 404) and "secret" not in answer.text and "abc" not in answer.text


async def test_without_a_bundle_the_page_says_what_to_do(
    make_control: Callable[..., Control], tmp_path: Path
) -> None:
    """In a working tree without Node the API works all the same."""
    app = build_admin_app(make_control(learning=False), hash_key(KEY), bundle=Bundle(tmp_path / "none"))
    async with client_of(app) as client:
        answer = await client.get("/admin/")
        assert answer.status_code == 503 and "npm run build" in answer.text
        assert "<script" not in answer.text and "style=" not in answer.text
        headers = {"authorization": f"Bearer {KEY}"}
        assert (await client.get("/admin/api/overview", headers=headers)).status_code == 200


def test_packed_files_are_the_files(folder: Path) -> None:
    """Only where that is smaller."""
    files = Bundle(folder)._files

    packed = files["assets/index-B1a2C3d4.js"].packed
    assert packed is not None and gzip.decompress(packed).decode() == SCRIPT
    assert files["favicon.svg"].packed is None and sorted(files) == [
        "assets/index-B1a2C3d4.js", "favicon.svg", "index.html",
    ]  # fmt: skip
