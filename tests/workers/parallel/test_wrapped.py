"""transformers' own tensor parallelism and ours on the same weights -> the same logits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_cut_here_computes_what_transformers_computes(
    model_folder: Callable[[str], Path], family: str
) -> None:
    """Two processes each way, for a family of each kind of cut that transformers' tables have."""
    command = [sys.executable, str(Path(__file__).with_name("wrapped.py")), str(model_folder(family))]
    ports = [str(_free_port()) for _ in range(2)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "GANG_PORT": ports[1]}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0]
    difference, largest = map(float, said[0].split()[-2:])
    assert difference <= 1e-5 * largest


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
