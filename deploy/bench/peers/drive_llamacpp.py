"""Prompts -> what llama.cpp makes of them through its batch API: one `llama_batch` a step for all streams.

Runs in the peer's own Python and imports nothing of Paceline. The C API as `llama-cpp-python` binds it, with as
little Python around it as can be: batches are filled through numpy views, and a step's tokens are one argmax over the
logits where llama.cpp left them. Weights and KV in float32, as everybody computes here. A draft model speculates as
llama.cpp's own examples do: draft greedily, put the draft into one batch of the target, keep the longest prefix the
target agrees with, take the rest out of both caches.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
_F32 = 0
"""GGML_TYPE_F32, of keys and values."""
_BATCH = 512
"""Tokens of one call, llama.cpp's own default for what it computes at once."""


def plain(threads: Sequence[int]) -> list[Settings]:
    """What is tried without drafts: threads, with and without flash attention, one KV buffer or one for each stream."""
    return [
        {
            "name": f"{number} threads, {'flash' if flash else 'plain'} attention, {'one buffer' if unified else 'split buffers'}",
            "threads": number,
            "flash": flash,
            "unified": unified,
        }
        for number in threads
        for flash in (True, False)
        for unified in (False, True)
    ]


def speculative(best: Settings) -> list[Settings]:
    """What is tried with drafts: how deep, how sure the draft has to be, and the draft's weights halved."""
    return [
        {**best, "name": f"draft model ({kind}), {depth} drafted, p >= {sure:g}, {best['name']}", "depth": depth, "sure": sure, "kind": kind}
        for kind in ("f32", "bf16")
        for depth, sure in ((3, 0.0), (6, 0.0), (8, 0.5), (16, 0.75))
    ]  # fmt: skip


def environment(settings: Settings) -> dict[str, str]:
    """Nothing: threads are a context's own."""
    return {}


def _widest(info: str) -> str:
    """Of what its build says that it uses ("CPU : AVX = 1 | AVX512 = 1 | OPENMP = 1"): the widest instructions."""
    used = [part.partition("=")[0].split()[-1] for part in info.split("|") if part.strip().endswith("= 1")]
    for prefix in ("AMX", "AVX512", "SVE", "AVX", "NEON"):
        found = [name for name in used if name.startswith(prefix)]
        if found:
            return found[0]
    return "no vector instructions"


class Driver:
    """Models as GGUF, and a context for each number of streams."""

    packages = ("llama-cpp-python", "gguf")

    def __init__(
        self, target: str, draft: str | None, work: str, max_streams: int, max_len: int, settings: Settings
    ) -> None:
        import llama_cpp.llama_cpp as lib

        self._lib = lib
        self._settings = settings
        self._max_len = max_len
        lib.llama_backend_init()
        self._target = _model(lib, target, work, "f32")
        self._contexts: dict[int, _Context] = {}
        self._draft: _Context | None = None
        self.text = f"batch API, {settings['name']}, {_widest(lib.llama_print_system_info().decode())}"
        if "depth" in settings:
            if draft is None:
                raise ValueError("speculation without a draft")
            model = _model(lib, draft, work, settings["kind"])
            self._draft = _Context(lib, model, 1, max_len, settings)

    def run(self, prompts: list[list[int]], num_tokens: int, streams: int) -> list[list[int]]:
        """`streams` at a time, as equal requests are; with a draft one at a time."""
        if streams not in self._contexts:
            self._contexts[streams] = _Context(
                self._lib, self._target, streams, self._max_len, self._settings
            )
        context = self._contexts[streams]
        if self._draft is not None:
            if streams > 1:
                raise NotImplementedError("drafts for one stream at a time")
            return [self._speculate(context, self._draft, prompt, num_tokens) for prompt in prompts]
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), streams):
            outputs.extend(_generate(context, prompts[first : first + streams], num_tokens))
        return outputs

    def _speculate(self, target: _Context, draft: _Context, prompt: list[int], num_tokens: int) -> list[int]:
        """Draft, verify, keep what agrees; `text` ends with the one token that neither cache holds."""
        target.clear()
        draft.clear()
        text = [*prompt, int(target.prefill([prompt])[0])]
        end = len(prompt) + num_tokens
        while len(text) < end:
            drafted = self._drafted(draft, text, min(self._settings["depth"], end - len(text) - 1))
            best = target.extend([text[-1], *drafted], len(text) - 1, every=True).argmax(1).tolist()
            num_right = 0
            while num_right < len(drafted) and drafted[num_right] == best[num_right]:
                num_right += 1
            target.cut(len(text) + num_right)
            draft.cut(len(text) + num_right)
            text.extend(best[: num_right + 1])
        return text[len(prompt) :]

    def _drafted(self, draft: _Context, text: list[int], most: int) -> list[int]:
        """What the draft goes on with, as long as it is sure enough."""
        import numpy as np

        drafted: list[int] = []
        sure = self._settings["sure"]
        fed = text[draft.length :]
        while len(drafted) < most:
            logits = draft.extend(fed, draft.length)[0]
            token = int(logits.argmax())
            if sure and 1.0 < sure * float(np.exp(logits - logits[token]).sum()):
                break
            drafted.append(token)
            fed = [token]
        return drafted


def _generate(context: _Context, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy, a token for each stream and step."""
    import numpy as np

    context.clear()
    steps = [context.prefill(prompts)]
    positions = np.array([len(prompt) for prompt in prompts], np.int32)
    while len(steps) < num_tokens:
        steps.append(context.step(steps[-1], positions))
        positions += 1
    rows: list[list[int]] = np.stack(steps, 1).tolist()
    return rows


class _Context:
    """A `llama_context` and the batch it is fed by; the arrays of the batch are numpy's."""

    def __init__(self, lib: Any, model: Any, streams: int, max_len: int, settings: Settings) -> None:
        import numpy as np

        params = lib.llama_context_default_params()
        params.n_ctx = streams * max_len
        params.n_batch = params.n_ubatch = _BATCH
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.type_k = params.type_v = _F32
        params.flash_attn_type = int(settings["flash"])
        params.kv_unified = settings["unified"]
        params.no_perf = True
        self._lib = lib
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama_init_from_model refused these parameters")
        self._memory = lib.llama_get_memory(self._context)
        self._num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.length = 0
        """Tokens in the cache of stream 0, where there is only one."""
        self._token, self._pos, self._seq, self._ones = (np.ones(_BATCH, np.int32) for _ in range(4))
        self._wants = np.zeros(_BATCH, np.int8)
        # Each token belongs to one sequence: a pointer to its number.
        self._pointers = self._seq.ctypes.data + np.arange(_BATCH, dtype=np.uint64) * self._seq.itemsize
        i32 = ctypes.POINTER(ctypes.c_int32)
        self._batch = lib.llama_batch(
            0,
            self._token.ctypes.data_as(i32),
            None,
            self._pos.ctypes.data_as(i32),
            self._ones.ctypes.data_as(i32),
            self._pointers.ctypes.data_as(ctypes.POINTER(i32)),
            self._wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._np = np

    def clear(self) -> None:
        """Forget all streams."""
        self._lib.llama_memory_clear(self._memory, False)
        self.length = 0

    def cut(self, length: int) -> None:
        """Forget what stream 0 holds from there on."""
        if self.length > length:
            self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)
            self.length = length

    def prefill(self, prompts: list[list[int]]) -> Any:
        """int64 [streams]: the first token of each stream."""
        np = self._np
        tokens = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
        positions = np.concatenate([np.arange(len(prompt), dtype=np.int32) for prompt in prompts])
        numbers = np.repeat(np.arange(len(prompts), dtype=np.int32), [len(prompt) for prompt in prompts])
        wants = np.zeros(len(tokens), np.int8)
        wants[np.cumsum([len(prompt) for prompt in prompts]) - 1] = 1
        found = []
        for first in range(0, len(tokens), _BATCH):
            part = slice(first, first + _BATCH)
            logits = self._decode(tokens[part], positions[part], numbers[part], wants[part])
            found.append(logits.argmax(1))
        self.length = len(prompts[0])
        return np.concatenate(found)

    def step(self, tokens: Any, positions: Any) -> Any:
        """int64 [streams]: the token behind these, one of each stream."""
        num = len(tokens)
        return self._decode(tokens, positions, self._np.arange(num), self._ones[:num]).argmax(1)

    def extend(self, tokens: list[int], position: int, *, every: bool = False) -> Any:
        """float32 [len(tokens) or 1, V]: stream 0 goes on with these; logits behind `every` one of them, or the last."""
        np = self._np
        num = len(tokens)
        wants = np.ones(num, np.int8) if every else np.arange(num) == num - 1
        logits = self._decode(tokens, np.arange(position, position + num), 0, wants)
        self.length = position + num
        return logits

    def _decode(self, tokens: Any, positions: Any, numbers: Any, wants: Any) -> Any:
        """float32 [wanted, V], llama.cpp's own memory until the next call."""
        num = len(tokens)
        self._token[:num] = tokens
        self._pos[:num] = positions
        self._seq[:num] = numbers
        self._wants[:num] = wants
        self._batch.n_tokens = num
        code = self._lib.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        rows = int(self._np.count_nonzero(self._wants[:num]))
        if rows == 0:
            return self._np.zeros((0, self._num_tokens), self._np.float32)
        address = ctypes.cast(self._lib.llama_get_logits(self._context), ctypes.c_void_p).value
        memory = (ctypes.c_float * (rows * self._num_tokens)).from_address(address)
        return self._np.frombuffer(memory, self._np.float32).reshape(rows, self._num_tokens)


def _model(lib: Any, folder: str, work: str, kind: str) -> Any:
    """The loaded model, converted once for each run of the bench."""
    file = Path(work) / f"{Path(folder).parent.name}-{Path(folder).name}.{kind}.gguf"
    if not file.is_file():
        script = Path(__file__).with_name("gguf_file.py")
        subprocess.run([sys.executable, str(script), folder, str(file), kind], check=True, stdout=2)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(os.fsencode(file), params)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file.name}")
    return model
