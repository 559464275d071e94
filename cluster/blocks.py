"""Token counts and block hashes -> block ids of the paged KV pool: lent to one owner or several, found again later.

A full block of committed tokens can be registered under a hash of its tokens and all before them. Whoever starts
with the same tokens adopts it instead of computing it. What a block is, and how it changes:

    state     owners  hash   in                  becomes
    empty     0       no     the free list       private, when taken
    private   1       no     its owner's table   shared (registered), or empty
    shared    1..     yes    its owners' tables  cached, when its last owner leaves
    cached    0       yes    the LRU order       shared again (adopted), or private (evicted: taken for something else)

Only private blocks are written. Empty and cached ones both count as free.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.cluster.errors import IntegrityError


def chain_hash(parent: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
    """BLAKE2b-128 of one block's tokens (int32 [block_size]) behind `parent`, the hash of everything before."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


class BlockPool:
    """Books of a paged pool: which block belongs to whom, and which tokens it holds. Holds no tensor.

    Asking and doing are one call: `try_extend` returns False instead of raising when the pool is full, because a
    full pool is a normal state the scheduler answers by preempting.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks without an owner that can be found by hash, longest unused first."""
        self._owned: dict[str, list[int]] = {}
        self._num_owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._key = secrets.token_bytes(32)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those in the prefix cache included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that have an owner."""
        return self.num_blocks - self.num_free

    @property
    def num_findable(self) -> int:
        """Blocks registered under a hash, with or without an owner."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, owner: str) -> list[int]:
        """The owner's blocks in token order. Read only; empty if it owns none."""
        return self._owned.get(owner, [])

    def owners(self) -> set[str]:
        """Everyone who holds a block."""
        return set(self._owned)

    def try_extend(self, owner: str, num_tokens: int) -> bool:
        """Make the owner's table hold `num_tokens` tokens. Takes nothing and returns False if the pool cannot."""
        table = self._owned.get(owner, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        self._owned[owner] = table + [self._take() for _ in range(missing)]
        return True

    def shrink(self, owner: str, num_tokens: int) -> None:
        """Return the blocks behind the one that holds token `num_tokens - 1`."""
        table = self._owned.get(owner)
        if table is None:
            return
        keep = self.blocks_for(num_tokens)
        if keep >= len(table):
            return
        self._release(table[keep:])
        self._owned[owner] = table[:keep]
        if keep == 0:
            del self._owned[owner]

    def free(self, owner: str) -> int:
        """Return all of the owner's blocks; how many there were."""
        table = self._owned.pop(owner, [])
        self._release(table)
        return len(table)

    def num_reclaimable(self, owners: Iterable[str]) -> int:
        """Blocks that would be free if all these owners left: theirs, without those they share with others."""
        held = Counter(block for owner in owners for block in self.table(owner))
        return sum(num == self._num_owners[block] for block, num in held.items())

    # -- prefix cache ------------------------------------------------------------------------------------

    def root_hash(self, salt: str) -> bytes:
        """The parent of a first block. Keyed with this pool's secret: nobody outside can aim at a collision.

        Everything that changes KV, and whoever must not share it, belongs in the salt.
        """
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._key, digest_size=16).digest()

    def extend_hashes(
        self, hashes: list[bytes], num_blocks: int, token_ids: npt.NDArray[np.int32], salt: str
    ) -> None:
        """Append what `hashes` lacks of the first `num_blocks` full blocks of these tokens, int32 [num_tokens]."""
        size = self.block_size
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if index else self.root_hash(salt)
            hashes.append(chain_hash(parent, token_ids[index * size : (index + 1) * size]))

    def peek(self, hashes: Iterable[bytes]) -> int:
        """How many of these blocks, from the first on, can be found."""
        num = 0
        for block_hash in hashes:
            if block_hash not in self._block_of:
                break
            num += 1
        return num

    def adopt(self, owner: str, hashes: Sequence[bytes]) -> int:
        """Begin the owner's table with the blocks of the longest known prefix; how many tokens those hold.

        The owner must not hold any block yet and never writes to the adopted ones.
        """
        assert owner not in self._owned, f"{owner} holds blocks already"
        table = [self._block_of[block_hash] for block_hash in hashes[: self.peek(hashes)]]
        for block in table:
            self._num_owners[block] += 1
            self._cached.pop(block, None)
        if table:
            self._owned[owner] = table
        return len(table) * self.block_size

    def register(self, owner: str, index: int, block_hash: bytes) -> None:
        """Make the owner's block `index` findable: it is full, its tokens are committed, it is not written again.

        The first block of a hash stays: a second owner that computed the same keeps its copy to itself.
        """
        block = self._owned[owner][index]
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def forget(self, owner: str) -> None:
        """Make the owner's blocks unfindable: their KV is not to be trusted."""
        for block in self.table(owner):
            self._unregister(block)

    def forget_all(self) -> None:
        """Empty the prefix cache; owners keep their blocks."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()

    # -- blocks one by one -------------------------------------------------------------------------------

    def _take(self) -> int:
        """An empty block, or else the cached one that was unused for longest."""
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unregister(block)
        self._num_owners[block] = 1
        return block

    def _release(self, blocks: list[int]) -> None:
        """One owner less. The last block first, so that eviction takes a chain from its end."""
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block] > 0:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def _unregister(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    # -- integrity ---------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every block is empty, cached or owned, its owners are counted, and hashes and blocks match one to one.

        Raises:
            IntegrityError: with the numbers that do not add up.
        """
        held = Counter(block for table in self._owned.values() for block in table)
        seen = [*self._empty, *self._cached, *held]
        if sorted(seen) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(self._empty)} empty + {len(self._cached)} cached + {len(held)} owned blocks, "
                f"{len(set(seen))} distinct, pool has {self.num_blocks}"
            )
        for block, counted in enumerate(self._num_owners):
            if counted != held[block]:
                raise IntegrityError(f"block {block}: {held[block]} owners, counted {counted}")
        if any(len(set(table)) != len(table) for table in self._owned.values()):
            raise IntegrityError(f"a table of {len(self._owned)} holds a block twice")
        self._check_hashes()

    def _check_hashes(self) -> None:
        if {block: block_hash for block_hash, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError(
                f"{len(self._block_of)} hashes name {len(set(self._block_of.values()))} blocks, "
                f"{len(self._hash_of)} blocks know their hash"
            )
        for block in self._empty:
            if block in self._hash_of:
                raise IntegrityError(f"block {block} is empty and has a hash")
        for block in self._cached:
            if block not in self._hash_of:
                raise IntegrityError(f"block {block} is cached without a hash")
