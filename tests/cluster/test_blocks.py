"""Random calls -> the pool's books: every block has one owner or none, and a refusal takes nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cluster.blocks import BlockPool
from paceline.cluster.errors import IntegrityError

OWNERS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 40)


class PoolMachine(RuleBasedStateMachine):
    """A pool of 6 blocks of 4 tokens beside a model that knows only each owner's list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.model: dict[str, list[int]] = {}

    def num_free(self) -> int:
        return 6 - sum(map(len, self.model.values()))

    @rule(owner=OWNERS, num_tokens=COUNTS)
    def extend(self, owner: str, num_tokens: int) -> None:
        before = self.model.get(owner, [])
        missing = max(0, -(-num_tokens // 4) - len(before))
        fits = missing <= self.num_free()

        assert self.pool.try_extend(owner, num_tokens) is fits

        table = list(self.pool.table(owner))
        assert table[: len(before)] == before, "blocks in use moved"
        assert len(table) == len(before) + (missing if fits else 0)
        self.model[owner] = table

    @rule(owner=OWNERS, num_tokens=COUNTS)
    def shrink(self, owner: str, num_tokens: int) -> None:
        self.pool.shrink(owner, num_tokens)
        self.model[owner] = self.model.get(owner, [])[: -(-num_tokens // 4)]

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        num_held = len(self.model.pop(owner, []))

        assert self.pool.free(owner) == num_held

    @precondition(lambda self: self.num_free() == 6)
    @rule(owner=OWNERS)
    def take_all(self, owner: str) -> None:
        assert self.pool.try_extend(owner, 24)

        self.model[owner] = list(self.pool.table(owner))

    @invariant()
    def books_agree(self) -> None:
        held = [block for table in self.model.values() for block in table]
        assert len(held) == len(set(held)) and set(held) <= set(range(6))
        assert {owner: self.pool.table(owner) for owner in "abc"} == {o: self.model.get(o, []) for o in "abc"}
        assert self.pool.owners() == {owner for owner, table in self.model.items() if table}
        assert (self.pool.num_free, self.pool.num_used) == (6 - len(held), len(held))
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestBooksOfRandomCalls = PoolMachine.TestCase


@pytest.mark.parametrize("num_tokens, num_blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (24, 6)])
def test_tokens_are_rounded_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    """A block that is needed for one token is needed whole."""
    pool = BlockPool(6, 4)

    assert pool.blocks_for(num_tokens) == num_blocks


def test_an_owner_who_is_refused_keeps_what_it_had() -> None:
    """`try_extend` is all or nothing: free blocks that do not suffice stay free."""
    pool = BlockPool(4, 4)
    pool.try_extend("a", 8)
    table = list(pool.table("a"))

    assert not pool.try_extend("a", 20)
    assert pool.table("a") == table
    assert pool.num_free == 2


@pytest.mark.parametrize("defect", ["lost", "twice", "foreign"])
def test_books_that_do_not_add_up_are_reported(defect: str) -> None:
    """A block that is lost, lent twice or unknown is an IntegrityError with numbers."""
    pool = BlockPool(4, 4)
    pool.try_extend("a", 8)
    table = pool.table("a")
    if defect == "lost":
        table.pop()
    else:
        table[0] = table[1] if defect == "twice" else 9

    with pytest.raises(IntegrityError, match="4"):
        pool.check_integrity()
