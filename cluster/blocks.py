"""Token counts -> block ids of the paged KV pool, lent to one owner and returned whole."""

from __future__ import annotations

from collections import deque

from paceline.cluster.errors import IntegrityError


class BlockPool:
    """Books of a paged pool: which block belongs to whom. Holds no tensor.

    Asking and doing are one call: `try_extend` returns False instead of raising when the pool is full, because a
    full pool is a normal state the scheduler answers by preempting.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._owned: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, owner: str) -> list[int]:
        """The owner's blocks in token order. Read only; empty if it owns none."""
        return self._owned.get(owner, [])

    def try_extend(self, owner: str, num_tokens: int) -> bool:
        """Make the owner's table hold `num_tokens` tokens. Takes nothing and returns False if the pool cannot."""
        table = self._owned.get(owner, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        self._owned[owner] = table + [self._free.popleft() for _ in range(missing)]
        return True

    def shrink(self, owner: str, num_tokens: int) -> None:
        """Return the blocks behind the one that holds token `num_tokens - 1`."""
        table = self._owned.get(owner)
        if table is None:
            return
        keep = self.blocks_for(num_tokens)
        self._free.extend(table[keep:])
        self._owned[owner] = table[:keep]
        if not self._owned[owner]:
            del self._owned[owner]

    def free(self, owner: str) -> int:
        """Return all of the owner's blocks; how many there were."""
        table = self._owned.pop(owner, [])
        self._free.extend(table)
        return len(table)

    def owners(self) -> set[str]:
        """Everyone who holds a block."""
        return set(self._owned)

    def check_integrity(self) -> None:
        """Every block is free or owned, exactly once.

        Raises:
            IntegrityError: with the numbers that do not add up.
        """
        seen = list(self._free)
        for table in self._owned.values():
            seen.extend(table)
        if sorted(seen) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(self._free)} free + {len(seen) - len(self._free)} owned blocks, "
                f"{len(set(seen))} distinct, pool has {self.num_blocks}"
            )
