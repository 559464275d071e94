"""Random tokens and calls -> the prefix cache's books: what is found is what was put there, and nothing shared is written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.cluster.blocks import BlockPool
from paceline.cluster.errors import IntegrityError

SIZE = 2
Content = tuple[int, ...]


class Books:
    """A pool beside a naive model of it: a list for each owner, a list in LRU order, what was written to each block."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.dice = random.Random(seed)
        self.num_blocks = num_blocks
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, Content] = {}
        self.content: dict[int, Content] = {}
        """Block -> all tokens up to its end."""
        self.found: dict[Content, int] = {}
        """Those tokens -> the block that can be found by them."""
        self.lru: list[int] = []
        self.num_adopted = self.num_evicted = self.num_refused = self.num_twice = 0

    def hashes(self, tokens: Content) -> list[bytes]:
        out: list[bytes] = []
        self.pool.extend_hashes(out, len(tokens) // SIZE, np.asarray(tokens, np.int32), "salt")
        return out

    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def begin(self, owner: str) -> None:
        """A new owner of tokens that often start like another's."""
        if owner in self.tables:
            return
        tokens = tuple(self.dice.randrange(2) for _ in range(SIZE * self.dice.randrange(1, 6)))
        wanted = [tokens[: SIZE * (i + 1)] for i in range(len(tokens) // SIZE)]
        known = 0
        while known < len(wanted) and wanted[known] in self.found:
            known += 1
        assert self.pool.peek(self.hashes(tokens)) == known

        assert self.pool.adopt(owner, self.hashes(tokens)) == known * SIZE

        self.tokens[owner] = tokens
        table = [self.found[prefix] for prefix in wanted[:known]]
        if table:
            self.tables[owner] = table
        self.lru = [block for block in self.lru if block not in table]
        self.num_adopted += known
        assert [self.content[block] for block in table] == wanted[:known], "other tokens' KV"

    def extend(self, owner: str) -> None:
        """Take blocks, and write to the new ones."""
        before = self.tables.get(owner, [])
        num_tokens = self.dice.randrange(0, SIZE * (self.num_blocks + 2))
        missing = max(0, -(-num_tokens // SIZE) - len(before))
        num_empty = self.num_blocks - len(self.held()) - len(self.lru)
        fits = missing <= num_empty + len(self.lru)

        assert self.pool.try_extend(owner, num_tokens) is fits

        self.num_refused += not fits
        if not fits or not missing:
            return
        evicted, self.lru = (
            self.lru[: max(0, missing - num_empty)],
            self.lru[max(0, missing - num_empty) :],
        )
        self.found = {tokens: block for tokens, block in self.found.items() if block not in evicted}
        self.num_evicted += len(evicted)
        table = list(self.pool.table(owner))
        new = table[len(before) :]
        assert table[: len(before)] == before, "blocks in use moved"
        assert not set(new) & (self.held() | set(self.lru)), "taken from somebody"
        assert set(evicted) <= set(new), "evicted in vain"
        self.tables[owner] = table
        for block in new:
            self.content[block] = ()

    def write(self, owner: str) -> None:
        """Compute what is not computed, and offer it."""
        tokens = self.tokens.get(owner, ())
        for index, block in enumerate(self.tables.get(owner, [])[: len(tokens) // SIZE]):
            prefix = tokens[: SIZE * (index + 1)]
            if self.content[block] != prefix:
                assert block not in self.found.values(), "a shared block is written"
                assert sum(block in table for table in self.tables.values()) == 1
                self.content[block] = prefix
            self.pool.register(owner, index, self.hashes(tokens)[index])
            self.num_twice += prefix in self.found and self.found[prefix] != block
            if prefix not in self.found and block not in self.found.values():
                self.found[prefix] = block

    def give_back(self, owner: str, keep: int) -> None:
        table = self.tables.pop(owner, [])
        kept, gone = table[:keep], table[keep:]
        if kept:
            self.tables[owner] = kept
        for block in reversed(gone):
            if block not in self.held() and block in self.found.values():
                self.lru.append(block)

    def shrink(self, owner: str) -> None:
        num_tokens = self.dice.randrange(0, SIZE * self.num_blocks)
        self.pool.shrink(owner, num_tokens)
        self.give_back(owner, -(-num_tokens // SIZE))

    def free(self, owner: str) -> None:
        num_held = len(self.tables.get(owner, []))
        expected = {b for b in self.tables.get(owner, []) if sum(b in t for t in self.tables.values()) == 1}
        assert self.pool.num_reclaimable([owner]) == len(expected)
        free_before = self.pool.num_free

        assert self.pool.free(owner) == num_held

        self.give_back(owner, 0)
        self.tokens.pop(owner, None)
        assert self.pool.num_free == free_before + len(expected)

    def forget(self, owner: str) -> None:
        self.pool.forget(owner)
        gone = self.tables.get(owner, [])
        self.found = {tokens: block for tokens, block in self.found.items() if block not in gone}

    def agree(self) -> None:
        assert {owner: self.pool.table(owner) for owner in "abcd"} == {
            owner: self.tables.get(owner, []) for owner in "abcd"
        }
        assert self.pool.owners() == set(self.tables)
        assert self.pool.num_used == len(self.held())
        assert self.pool.num_free == self.num_blocks - len(self.held())
        assert self.pool.num_findable == len(self.found)
        assert list(self.pool._cached) == self.lru
        self.pool.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_agree_with_a_naive_model(seed: int) -> None:
    """4000 calls of four owners: tables, free blocks, what can be found, and the order of eviction."""
    books = Books(num_blocks=4 + seed, seed=seed)
    calls = [books.begin, books.extend, books.write, books.shrink, books.free]
    for _ in range(4000):
        call = books.dice.choices([*calls, books.forget], [6, 6, 8, 2, 4, 0.2])[0]
        call(books.dice.choice("abcd"))
        books.agree()
    for owner in "abcd":
        books.free(owner)
    books.agree()

    assert books.pool.num_free == books.num_blocks
    assert min(books.num_adopted, books.num_evicted, books.num_refused) > 20 and books.num_twice > 2


def filled(num_blocks: int, tokens: list[int], owner: str = "a") -> tuple[BlockPool, list[bytes]]:
    """A pool in which one owner computed and registered these tokens."""
    pool = BlockPool(num_blocks, SIZE)
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, len(tokens) // SIZE, np.asarray(tokens, np.int32), "")
    pool.try_extend(owner, len(tokens))
    for index, block_hash in enumerate(hashes):
        pool.register(owner, index, block_hash)
    return pool, hashes


def test_a_chain_loses_its_tail_first() -> None:
    """Each block taken from the cache shortens the prefix that can be found by one."""
    pool, hashes = filled(4, list(range(8)))
    pool.free("a")
    lengths = []
    for num in range(1, 5):
        pool.try_extend("b", num * SIZE)
        lengths.append(pool.peek(hashes))

    assert lengths == [3, 2, 1, 0]


def test_a_prefix_used_again_outlives_one_that_was_not() -> None:
    """Least recently used goes first, whatever was computed first."""
    pool, hashes = filled(4, [1, 1, 2, 2])
    others: list[bytes] = []
    pool.extend_hashes(others, 2, np.asarray([3, 3, 4, 4], np.int32), "")
    pool.try_extend("b", 4)
    for index in range(2):
        pool.register("b", index, others[index])
    pool.free("a")
    pool.free("b")
    pool.adopt("c", hashes)
    pool.free("c")
    pool.try_extend("d", 4)

    assert (pool.peek(hashes), pool.peek(others)) == (2, 0)


def test_equal_tokens_behind_other_tokens_or_another_salt_are_another_block() -> None:
    """A block's hash covers everything before it and the salt; and no two pools share a secret."""
    pool = BlockPool(4, SIZE)

    def last(tokens: list[int], salt: str, where: BlockPool = pool) -> bytes:
        hashes: list[bytes] = []
        where.extend_hashes(hashes, 2, np.asarray(tokens, np.int32), salt)
        return hashes[-1]

    hashes = [
        last([1, 2, 3, 4], "x"),
        last([1, 1, 3, 4], "x"),
        last([1, 2, 3, 4], "y"),
        last([3, 4, 1, 2], "x"),
    ]
    assert len({*hashes, last([1, 2, 3, 4], "x", BlockPool(4, SIZE))}) == 5
    assert hashes[0] == last([1, 2, 3, 4], "x")
    assert last([1, 2, 3, 4], "\ud800") != hashes[0]


def test_blocks_under_doubt_are_not_found_again() -> None:
    """`forget` leaves the owner its blocks; `forget_all` empties the cache."""
    pool, hashes = filled(4, list(range(8)))
    pool.forget("a")

    assert pool.peek(hashes) == 0 and len(pool.table("a")) == 4
    pool.check_integrity()
    pool, hashes = filled(6, list(range(8)))
    pool.adopt("b", hashes[:2])
    pool.free("a")
    pool.forget_all()
    pool.check_integrity()
    assert pool.peek(hashes) == 0 and pool.num_free == 4
    pool.free("b")
    assert pool.num_free == 6


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("owners", r"block 0: 1 owners, counted 2"),
        ("two blocks", r"4 hashes name 3 blocks, 4 blocks"),
        ("unhashed", r"3 hashes name 3 blocks, 4 blocks"),
        ("cached", r"block 3 is cached without a hash"),
        ("empty", r"block 3 is empty and has a hash"),
        ("both", r"0 empty \+ 1 cached \+ 4 owned blocks, 4 distinct, pool has 4"),
    ],
)
def test_a_cache_that_does_not_add_up_is_reported(defect: str, message: str) -> None:
    """Owners miscounted, hashes and blocks not one to one, a block in two places."""
    pool, hashes = filled(4, list(range(8)))
    if defect == "owners":
        pool._num_owners[0] = 2
    elif defect == "two blocks":
        pool._block_of[hashes[0]] = pool._block_of[hashes[1]]
    elif defect == "unhashed":
        del pool._block_of[hashes[0]]
    elif defect == "both":
        pool._cached[0] = None
    else:
        pool.shrink("a", 6)
        if defect == "cached":
            pool._unregister(3)
        else:
            pool._cached.clear()
            pool._empty.append(3)

    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()
