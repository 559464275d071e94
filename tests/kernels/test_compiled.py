"""Compiled loops where nothing can be kept, and where several processes want the same one at once."""

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


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """Three workers of one machine: one compiles, two load what it kept."""
    package = tmp_path / "loops"
    package.mkdir()
    shutil.copy(KERNELS / "compiled.py", package / "compiled.py")
    (package / "loop.py").write_text(
        "import compiled\n"
        "@compiled.compiled\n"
        "def double(n):\n"
        "    return n * 2\n"
        "if __name__ == '__main__':\n"
        "    from loop import double\n"
        "    with compiled.one_at_a_time(double, 'test'):\n"
        "        double(4)\n"
        "    print(sum(double.stats.cache_hits.values()), sum(double.stats.cache_misses.values()))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "loop.py"], cwd=package, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in started)

    assert said == ["0 1", "1 0", "1 0"]
