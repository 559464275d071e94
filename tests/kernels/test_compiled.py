"""Compiled loops where nothing can be kept: they still run, and say what it costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def test_loops_are_compiled_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """A read-only installation of a user without a home: a warning, and the same numbers."""
    package = tmp_path / "loops"
    package.mkdir()
    shutil.copy(KERNELS / "compiled.py", package / "compiled.py")
    (package / "__pycache__").write_text("not a folder")
    program = (
        "import sys, logging; logging.basicConfig(); sys.path.insert(0, sys.argv[1])\n"
        "import compiled\n"
        "assert 'numba' in sys.modules\n"
        "print(compiled.compiled(compile_me)(4))\n"
    )
    (package / "loop.py").write_text(program.replace("compile_me", "lambda n: n * 2"))
    environment = {**os.environ, "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, str(package / "loop.py"), str(package)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout.strip() == "8"
    assert "NUMBA_CACHE_DIR" in done.stderr
