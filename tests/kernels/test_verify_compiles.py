"""Verification kernels that the interpreter runs -> machine code for an H100 or H200, made here without one.

In a process of its own, because whether Triton interprets is decided when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import distill_loss_triton as distill
from paceline.kernels import keyed_noise_triton as noise
from paceline.kernels import top_logits_triton as top
from paceline.kernels import verify_ratio_triton as ratio
from paceline.kernels import verify_rows_triton as rows
from paceline.kernels import verify_triton as verify
from paceline.kernels.vocabulary_triton import Columns, Edits

INT, FLOAT = "*i32", "*fp32"
TYPES = dict(
    logits="*bf16", columns=Columns(FLOAT, INT, FLOAT, FLOAT, "*i64", "*i64", "*i64", "*i64"),
    edits=Edits(INT, INT, FLOAT, INT, INT, "i32"),
    masses="*i64", row_masses="*i64", bias="*fp64", repetition="*fp64", minus="*fp64",
    decided_usable="*i1", out_usable="*i1", is_drawn="*i1",
    seeds="*i64", positions="*i64", choices="*i64", prompts="*i64", out="*bf16",
)
TYPES |= dict.fromkeys(
    ["rows", "score_ids", "broken", "listed_ids", "found", "settled", "starts", "tokens", "parents", "row_ids",
     "decided", "out_tokens", "out_rows", "out_num", "ids", "q_ids", "stop_rows"], INT)
TYPES |= dict.fromkeys(
    ["scores", "maxima", "tops", "listed", "floors", "row_tops", "boundaries", "row_scores", "values", "log_sums", "own",
     "q", "rest", "scales", "temperatures", "kept", "grads"], FLOAT)
WHOLE = {"stride", "num_ids", "first_id"}  # multiples of 16 in a model


def compiles(kernel, num_warps, types={}, **constants):
    types = TYPES | types
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    is_whole = lambda n: n in WHOLE or str(signature[n]).startswith("*")
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if is_whole(n)}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, hints)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert made.metadata.shared <= 227 << 10, (kernel, made.metadata.shared)
    return made.asm


EDITS = dict(HAS_CHANGES=True, HAS_MASKS=True)
NO_EDITS = dict(HAS_CHANGES=False, HAS_MASKS=False)
TILES = dict(BLOCK=1024)
plain = compiles(rows.scan, 4, MODE=0, HAS_FILTERS=False, GROUP=32, **TILES, **NO_EDITS)
assert "mul.wide.u32" in plain["ptx"] and "mul.hi.u32" not in plain["ptx"]  # one multiplication, not two
assert "convert_layout" not in plain["ttgir"]  # noise meets its logits without a way through shared memory
assert "ld.global.v2.b32" in plain["ptx"]  # eight bytes a load
for mode in (0, 1, 2):
    compiles(rows.scan, 4, MODE=mode, HAS_FILTERS=True, GROUP=32, **TILES, **EDITS)
    compiles(rows.collect, 16, MODE=mode, GROUPS=8192, CAPACITY=4096, BLOCK=4096, **EDITS)
compiles(rows.change, 1, BLOCK=128)
compiles(rows.settle, 16, MODE=0, CAPACITY=4096, LISTED=4096)
compiles(rows.settle, 16, MODE=0, CAPACITY=1024, LISTED=8192)
compiles(rows.settle_wide, 16, MODE=0, BLOCK=4096, **EDITS)
compiles(verify.walk, 1, HAS_FILTERS=True, PIECES=8, NODES=8, WIDTH=5, PADDED=8)
support = dict(SUPPORT=128)
compiles(ratio.walk_ratio, 1, WITHOUT_REPLACEMENT=True, PIECES=8, WIDTH=5, PADDED=8, **support, **EDITS)
compiles(ratio.draw, 4, **support, **TILES, **EDITS)
compiles(ratio.join, 1, WIDTH=5, PIECES=8, **support)
compiles(top.order, 8, CAPACITY=512, CHUNK=32, **TILES)
captured = {"ids": "*i64"}
compiles(distill._forward, 8, captured, BLOCK=2048, KEPT=128)
compiles(distill._backward, 4, BLOCK=2048, KEPT=128)
compiles(distill._backward_kept, 1, captured, KEPT=128)
compiles(noise._write_rows, 4, {"out": FLOAT}, AS_WORDS=False, **TILES)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verification_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    """All variants a step uses, at the sizes of a model with 152k tokens."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=580, check=False
    )

    assert run.returncode == 0, run.stderr[-3000:]
