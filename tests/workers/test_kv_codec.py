"""A lossy codec on the link -> fewer bytes, KV within its bound, and every answer says so; without one, nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import Tensor

import harness as h
from paceline.cluster.types import KVReady
from paceline.kernels.kv_codec import error_bound
from paceline.workers.decode import DecodeWorker
from paceline.workers.kv_cache import KVCache, digest
from paceline.workers.kv_codec import Codec, decode, encode, sent_as
from paceline.workers.kv_link import Arrival, store_arrival
from paceline.workers.prefill import PrefillWorker

LAYERS, HEADS, DIM = 3, 2, 16
PROMPT = h.prompt(150, seed=3)
KEY = bytes(range(32))
CODECS: tuple[Codec, ...] = ("int8", "fp8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


async def hand_off(
    models: Path, *settings: str, sender: Codec | None = None
) -> tuple[Tensor, list[int], Any]:
    """The decode worker's pool [layers, 2, n, G, D] after one prompt's KV, the text, and the gateway's report."""
    async with h.cluster(models, "speculation.enabled=false", *settings) as cluster:
        prefill, decode_worker = await cluster.add(PrefillWorker, "0"), await cluster.add(DecodeWorker, "0")
        assert isinstance(decode_worker, DecodeWorker)
        if sender is not None:
            kv = prefill.config.kv.model_copy(update={"codec": sender})
            prefill.config = prefill.config.model_copy(update={"kv": kv})
        tokens, report = await cluster.run(h.request("r", PROMPT, 8))
        slots = torch.arange(len(PROMPT) - 1)
        cache = decode_worker._engine.runner.cache
        return torch.stack([cache.gather(layer, slots) for layer in range(LAYERS)]), tokens, report


@pytest.mark.parametrize("codec", CODECS)
async def test_kv_arrives_within_the_codecs_bound_and_the_answer_says_so(models: Path, codec: Codec) -> None:
    """A byte an element and four a row are sent; each element of the pool is as near as the codec promises."""
    exact = await hand_off(models)
    pool, _, report = await hand_off(models, f"kv.codec={codec}")

    assert exact[2].kv_sources == ["link"]
    assert exact[2].kv_bytes == (len(PROMPT) - 1) * LAYERS * 2 * HEADS * DIM * 4
    assert report.kv_sources == [f"link:{codec}"]
    assert report.kv_bytes == (len(PROMPT) - 1) * LAYERS * 2 * HEADS * (DIM + 4)
    # Later layers were computed from exact KV by the sender: only the link lost something.
    assert bool(((pool - exact[0]).abs() <= error_bound(exact[0], codec)).all())
    assert not torch.equal(pool, exact[0])


async def test_ends_that_code_differently_do_not_talk(models: Path) -> None:
    """The receiver refuses the layout and computes the prompt itself: the exact text, not bytes misread."""
    exact = await hand_off(models)
    pool, tokens, report = await hand_off(models, "kv.codec=int8", sender="none")

    assert report.kv_sources == ["local:layout"]
    assert tokens == exact[1]
    torch.testing.assert_close(pool, exact[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", ["none", *CODECS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_has_the_announced_shape_and_decodes(codec: Codec, dtype: torch.dtype) -> None:
    """Odd sizes too; with none, what is sent is the very tensor."""
    rows = torch.randn(2, 2, 1, 3, 5).to(dtype)
    sent = encode(rows, codec)
    found = decode(sent, rows.shape, dtype, codec)

    assert (sent.shape, sent.dtype) == sent_as(rows.shape, dtype, codec)
    assert (sent is rows) == (codec == "none")
    assert found.shape == rows.shape and found.dtype == dtype
    torch.testing.assert_close(found, rows, rtol=0.07, atol=0.02)


@pytest.mark.parametrize("digest_by", ["blake3", "gmac"])
@pytest.mark.parametrize("codec", ["none", *CODECS])
def test_neither_a_changed_byte_nor_a_wrong_pool_passes(
    codec: Codec, digest_by: Literal["blake3", "gmac"]
) -> None:
    """The digest is of what was sent; what the pool holds must be what that decodes to, in all of its slots."""
    cache = KVCache(
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        num_blocks=4,
        block_size=4,
        model_version="",
        dtype=torch.float32,
    )
    rows = torch.randn(1, 2, 2, 5, 8)
    sent = encode(rows, codec)
    place = KVReady("r", 1, "kv/1", 0, 1, 0, 2, 0, 5, digest_by=digest_by)
    message = msgspec.structs.replace(place, digest=digest(KEY, place, sent))

    def passes(changed: Tensor, slots: list[int], key: bytes = KEY) -> bool:
        arrived = decode(changed, rows.shape, rows.dtype, codec)
        return store_arrival(cache, torch.tensor(slots), key, Arrival(message, arrived, changed)).is_intact

    assert passes(sent, [3, 9, 4, 1, 0])
    assert torch.equal(
        cache.pack(message, torch.tensor([3, 9, 4, 1, 0])), decode(sent, rows.shape, rows.dtype, codec)
    )
    for at in (0, 17, sent.nbytes - 1):
        changed = sent.clone()
        changed.view(-1).view(torch.uint8)[at] ^= 1
        assert not passes(changed, [3, 9, 4, 1, 0])
    assert not passes(sent, [3, 9, 4, 4, 0])
    assert not passes(sent, [3, 9, 4, 1, 0], bytes(32))
