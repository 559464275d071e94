"""K and V rows of each layer <-> the paged pool: write, move, gather for a peer, scatter from one, digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from paceline.cluster.types import HeadRange, KVLayout, KVReady
from paceline.kernels.dispatch import Backend
from paceline.kernels.kv_commit import kv_commit
from paceline.kernels.kv_gather import kv_digest, kv_gather
from paceline.kernels.kv_scatter import kv_scatter

_NONCE = bytes(12)


class KVCache:
    """The pool's tensors, for each layer K and V as [G, num_slots, D]; slot = block * block_size + offset.

    Rows are taken and given as [n, G, D], whatever the storage.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        model_version: str,
        dtype: torch.dtype = torch.float32,
        heads: HeadRange | None = None,
        device: torch.device | str = "cpu",
        has_scratch: bool = False,
    ) -> None:
        """`heads`: those of the `num_kv_heads` that are kept here, G of them; all if not given.

        `has_scratch`: one more block, which no table names, for rows that only fill up a step.
        """
        self.heads = heads or HeadRange(0, num_kv_heads)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layout = KVLayout(
            num_layers, num_kv_heads, head_dim, str(dtype).removeprefix("torch."), model_version
        )
        self.dtype = dtype
        self.books: object = None
        """Whose block tables were last used to write here: engines that share a pool must not trust old KV in it."""
        self.on_move: Callable[[Tensor, Tensor], None] | None = None
        """Told of every `move`: pools of other ranks hold the other heads of the same slots."""
        # One head's rows lie together: attention reads them in runs, and a range of heads is a slice.
        num_slots = (num_blocks + has_scratch) * block_size
        shape = (num_layers, 2, self.heads.num, num_slots, head_dim)
        # Zeros come from the kernel: pages become resident when they are first written.
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self.device = self._pool.device
        self.scratch_slot = num_blocks * block_size if has_scratch else -1
        views = self._pool if self.device.type == "cpu" and dtype == torch.float32 else torch.empty(0, 2)
        self.array = views.numpy()
        """[layers, 2, G, num_slots, D], a view of the pool; nothing where that is not float32 on the CPU."""
        self.arrays = [(layer[0].numpy(), layer[1].numpy()) for layer in views]
        """(K, V) of each layer as arrays [G, num_slots, D], views of the pool."""

    @staticmethod
    def bytes_per_token(
        num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """KV bytes of one token: 2 * layers * KV heads * head size * element size."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def keys(self, layer: int) -> Tensor:
        """[G, num_slots, D], a view."""
        return self._pool[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[G, num_slots, D], a view."""
        return self._pool[layer, 1]

    def slots(self, table: list[int], start: int, stop: int) -> Tensor:
        """int64 [stop - start]: pool slots of token positions [start, stop) of a stream with this block table."""
        positions = np.arange(start, stop)
        blocks = np.asarray(table, np.int64)[positions // self.block_size]
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size).to(self.device)

    def write(self, layer: int, slots: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store new rows."""
        self._pool[layer, 0].index_copy_(1, slots, k_TGD.transpose(0, 1))
        self._pool[layer, 1].index_copy_(1, slots, v_TGD.transpose(0, 1))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy all layers' rows from slots to slots (int64 [n]); sources are read before any is overwritten."""
        if self.on_move is not None:
            self.on_move(source, destination)
        self._pool[:, :, :, destination] = self._pool[:, :, :, source]

    def commit(
        self, tables_BX: Tensor, starts_B: Tensor, paths_BN: Tensor, *, backend: Backend | None = None
    ) -> None:
        """`kv_commit` for this pool: accepted nodes to their places, of all streams at once, paths never seen by the host."""
        assert self.on_move is None, "other ranks' pools are moved by `move`"
        kv_commit(self._pool, tables_BX, starts_B, paths_BN, block_size=self.block_size, backend=backend)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """[2, n, G, D] contiguous copy of K and V rows."""
        return self._pool[layer].index_select(2, slots).transpose(1, 2).contiguous()

    def scatter(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Inverse of `gather`."""
        self._pool[layer].index_copy_(2, slots, rows.transpose(1, 2))

    def pack(self, message: KVReady, slots: Tensor) -> Tensor:
        """[num_layers, 2, num_heads, n, D] contiguous copy of the rows that `message` announces, as they are stored."""
        return self._part(message).index_select(3, slots)

    def unpack(self, message: KVReady, slots: Tensor, rows: Tensor) -> None:
        """Inverse of `pack`."""
        self._part(message).index_copy_(3, slots, rows.to(self.device))

    def pack_marked(self, key: bytes, message: KVReady, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What `pack` gives, and its `digest` as uint8 [16] on the pool's device: the pool is read once, nothing waits."""
        part = self._part(message)
        shape = (*part.shape[:3], len(slots), part.shape[4])
        return kv_gather(part, slots, place_key(key, message, shape, self.dtype))

    def unpack_marked(self, key: bytes, message: KVReady, slots: Tensor, rows: Tensor) -> Tensor:
        """`unpack`, and the digest (as in `pack_marked`) of what the pool then holds."""
        return kv_scatter(self._part(message), slots, rows, place_key(key, message, rows.shape, self.dtype))

    def _part(self, message: KVReady) -> Tensor:
        """The layers and heads of a message, [num_layers, 2, num_heads, num_slots, D], a view."""
        layers = self._pool[message.layer : message.layer + message.num_layers]
        first = message.head_start - self.heads.start
        return layers[:, :, first : first + message.num_heads]


def digest(key: bytes, message: KVReady, rows: Tensor) -> bytes:
    """16 bytes of KV rows and of where they belong, keyed (32 bytes), by the way that `message.digest_by` names.

    Bytes that are intact but belong to another request, epoch, layer, head or range have another digest. The sequence
    number counts transfers, not places, and is left out.

    On a processor GMAC (NIST SP 800-38D), which has instructions of its own: 256 KiB took 14 us where BLAKE3 took
    55. Its nonce may be constant, for every message has a key of its own (`place_key`).
    """
    place = place_key(key, message, rows.shape, rows.dtype)
    if message.digest_by == "gmac":
        rows = rows.contiguous().cpu()  # of a GPU's pool, if a processor sent them
        # numpy has no bfloat16
        plain = rows if rows.dtype == torch.float32 else rows.view(-1).view(torch.uint8)
        return AESGCM(place).encrypt(_NONCE, b"", plain.numpy().data.cast("B"))
    return octets(kv_digest(rows.contiguous(), place))


def place_key(key: bytes, message: KVReady, shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """The key (32 bytes) of one message's digest: the pair's key, and all that says where the rows belong and how they lie.

    What is hashed under it is the rows alone, whole words from the first, as a GPU likes it.
    """
    is_blank = not (message.seq or message.digest)
    place = message if is_blank else msgspec.structs.replace(message, seq=0, digest=b"")
    return blake3(msgspec.msgpack.encode((place, tuple(shape), str(dtype))), key=key).digest()


def octets(mark: Tensor) -> bytes:
    """A digest's bytes; waits for the device that takes it."""
    return mark.cpu().numpy().tobytes()
