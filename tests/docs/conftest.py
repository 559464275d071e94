"""docs/_site -> `docs_site.blocks` and `docs_site.made`, without docs/_site on the module path."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "_site"
_package = types.ModuleType("docs_site")
_package.__path__ = [str(_FOLDER)]
_package.__spec__ = importlib.util.spec_from_loader("docs_site", loader=None, is_package=True)
sys.modules.setdefault("docs_site", _package)
