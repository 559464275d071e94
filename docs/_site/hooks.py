"""Pages in Markdown -> pages with what is made from code: tables, references, pictures; for `mkdocs build`.

A line `<!-- made: NAME -->` stands for what `made.MAKERS[NAME]` writes. An image of docs/pictures is put into the page
itself, so that it takes the page's colours.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import blocks
import made
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_MADE = re.compile(r"^<!-- made: (?P<name>[a-z-]+) -->$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[(?P<words>[^\]]*)\]\((?:\.\./)*pictures/(?P<name>[a-z-]+)\.svg\)$", re.MULTILINE)


def on_startup(**_: Any) -> None:
    """Links under which the folders have their import name: mkdocstrings looks for them when it is configured."""
    root = Path(__file__).parents[2]
    links = root / "build" / "docs-import" / "paceline"
    links.mkdir(parents=True, exist_ok=True)
    for name in ("cluster", "workers", "kernels", "deploy"):
        link = links / name
        if not link.is_symlink():
            link.symlink_to(root / name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The two OpenAPI documents, for programs."""
    for name, document in (
        ("openapi.json", made.gateway_document()),
        ("admin-openapi.json", made.admin_document()),
    ):
        files.append(File.generated(config, f"reference/{name}", content=json.dumps(document, indent=1)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """See the module."""
    markdown = _MADE.sub(lambda found: made.MAKERS[found["name"]](), markdown)
    folder = Path(config["docs_dir"]) / "pictures"

    def picture(found: re.Match[str]) -> str:
        drawn = (folder / f"{found['name']}.svg").read_text()
        return f'<div class="picture" role="img" aria-label="{found["words"]}">{drawn}</div>'

    return blocks.for_readers(page.file.src_uri, _PICTURE.sub(picture, markdown))
