"""Kernels that the interpreter runs -> machine code for an H100 or H200, made here without one.

The interpreter is Python and takes what the compiler does not. One process, because whether Triton interprets is decided
when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = '''
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels.attention_merge_triton import _merge
from paceline.kernels.kv_codec_triton import _decode, _encode
from paceline.kernels.kv_commit_triton import _move
from paceline.kernels.kv_digest_triton import copy_and_hash, fold_all
from paceline.kernels.tree_attention_triton import _attend

def compiles(kernel, types, constants, **options):
    """`types`: of arguments by name; int32 for those that are not named."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"], kernel
    # What a multiprocessor of the card has of shared memory; more and the kernel could not start.
    assert made.metadata.shared <= 227 << 10, (kernel, made.metadata.shared)

words = dict.fromkeys(("pool", "staged", "key", "nodes", "digest"), "*u32")
strides = dict.fromkeys(("stride_layer", "stride_kv", "stride_head", "stride_k_head", "stride_v_head"), "i64")
for mode in (0, 1, 2):
    compiles(
        copy_and_hash, words | strides | {"slots": "*i64"}, dict(MODE=mode, CHUNKS=32, COPY=1024), num_warps=1
    )
compiles(fold_all, words, dict(LANES=32), num_warps=1)
tables = dict.fromkeys(("tables", "starts", "paths"), "*i32")
compiles(_move, strides | tables | {"pool": "*bf16"}, dict(BLOCK_SIZE=16, BLOCK_N=64, BLOCK_D=128))
codec = {"rows": "*bf16", "codes": "*u8", "scales": "*fp32"}
for int8, largest in ((True, 127.0), (False, 448.0)):
    compiles(_encode, codec, dict(LARGEST=largest, INT8=int8, ROWS=32, BLOCK_D=128))
    compiles(_decode, codec, dict(INT8=int8, ROWS=32, BLOCK_D=128))
floats = dict.fromkeys(("partial", "lse", "sinks"), "*fp32") | {"scaling": "fp32", "softcap": "fp32"}
arrays = dict.fromkeys(
    [
        "tables", "leading", "positions", "base", "bits", "ranks", "tile_rows", "tile_segment", "tile_base",
        "piece_tile", "piece_start", "piece_stop", "piece_entry", "program_start", "starts", "entries",
    ],
    "*i32",
)
for dtype, extras in (("bf16", False), ("bf16", True), ("fp32", True)):
    pools = dict.fromkeys(("q", "k_pool", "v_pool", "out"), f"*{dtype}")
    compiles(
        _attend,
        floats | arrays | strides | pools,
        dict(
            GROUP=4, ROWS=16, WORDS=2, BLOCK_SIZE=16, HAS_WINDOW=extras, HAS_CAP=extras, HAS_SINKS=extras,
            BLOCK_M=64, BLOCK_N=64, BLOCK_D=128, BLOCK_V=128, PRECISION="ieee" if dtype == "fp32" else "tf32",
        ),
        num_warps=4,
        num_stages=2,
    )
for sinks in (False, True):
    compiles(_merge, floats | arrays | {"out": "*bf16"}, dict(HAS_SINKS=sinks, HEADS=8, BLOCK_D=128))
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_and_kv_kernels_compile_for_sm_90(tmp_path: object) -> None:
    """All modes that a step uses, at sizes of an 8B model."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=580, check=False
    )

    assert run.returncode == 0, run.stderr[-3000:]
