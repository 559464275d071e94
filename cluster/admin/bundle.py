"""The built dashboard -> files under /admin/: hashed ones for ever, the page itself asked for anew each time."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fastapi import Request, Response

from paceline.cluster.admin.problems import AdminError

FOLDER = Path(__file__).with_name("static")
_PAGE = "index.html"
_HASHED = re.compile(r"assets/[^/]*[-.][A-Za-z0-9_-]{8,}\.[a-z0-9]+")
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
"""Not the machine's own table, which differs from one to the next. What is not here is not served."""
_PACKED = frozenset({".html", ".js", ".css", ".json", ".svg", ".txt", ".webmanifest"})
_MISSING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Paceline</title></head><body><main><h1>The dashboard is not in this installation</h1>
<p>Wheels of Paceline contain it. In a working tree <code>npm ci &amp;&amp; npm run build</code> in
<code>dashboard/</code> makes it.</p>
<p>The API works: <code>/admin/api/openapi.json</code> describes it, and <code>paceline drafts</code> uses it.</p>
</main></body></html>
"""


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is sent."""

    body: bytes
    packed: bytes | None
    """gzip, where that is smaller."""
    etag: str
    media_type: str
    caching: str


class Bundle:
    """All files of the dashboard, in memory: nothing that a request says is ever a path on the disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            str(PurePosixPath(path.relative_to(folder))): _load(path, path.relative_to(folder).as_posix())
            for path in (sorted(folder.rglob("*")) if folder.is_dir() else ())
            if path.is_file() and path.suffix in _TYPES and not path.name.startswith(".")
        }

    def answer(self, request: Request, path: str) -> Response:
        """The file; for any other name that is none of a file the page, which knows its own addresses.

        Raises:
            AdminError: 404.
        """
        if _PAGE not in self._files:
            return Response(_MISSING, 503, media_type="text/html")
        file = self._files.get(path or _PAGE)
        if file is None:
            if PurePosixPath(path).suffix:
                raise AdminError(404, "not_found", "there is no such file", "see /admin/")
            file = self._files[_PAGE]
        is_packed = file.packed is not None and "gzip" in request.headers.get("accept-encoding", "")
        etag = f'"{file.etag}-gz"' if is_packed else f'"{file.etag}"'
        headers = {"etag": etag, "cache-control": file.caching, "vary": "accept-encoding"}
        if _is_known(request.headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=headers)
        if is_packed:
            headers["content-encoding"] = "gzip"
        body = file.packed if is_packed else file.body
        return Response(body, headers=headers, media_type=file.media_type)


def _load(path: Path, name: str) -> File:
    body = path.read_bytes()
    packed = gzip.compress(body, 9, mtime=0) if path.suffix in _PACKED else None
    return File(
        body,
        packed if packed is not None and len(packed) < len(body) else None,
        hashlib.sha256(body).hexdigest()[:32],
        _TYPES[path.suffix],
        _FOR_EVER if _HASHED.fullmatch(name) else _ASK_AGAIN,
    )


def _is_known(given: str, etag: str) -> bool:
    """`If-None-Match`: proxies that pack may have made the tag a weak one."""
    return given.strip() == "*" or etag in (part.strip().removeprefix("W/") for part in given.split(","))
