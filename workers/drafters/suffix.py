"""Committed tokens -> an index of every context that came before -> draft trees copied from what followed it.

No model: a stream's own prompt and output are searched for the longest suffixes that occurred earlier, and so are
the finished outputs of its tenant. What followed those occurrences is merged into one tree.

The index is a binary search tree per pair of tokens, as in the match finders of file compressors. Its nodes are
the positions where the pair ends, ordered by the text read backwards from there, and each new position becomes
the root: in order of reading, long matches are neighbours; from the root down, nodes get older. So the nearest
nodes are the longest matches, of equal ones the latest comes first, and forgetting old text is cutting leaves.

How likely a copied token is, given that the tokens before it were right:

    est = hits / (total + 6 / length)

`total` are the occurrences of a match of `length` tokens, the latest counted twice, and `hits` those that go on
with this token. The second term stands for the continuations nobody has seen yet: one occurrence of a pair is
believed with 2 / (2 + 3) = 0.4, one of 16 tokens with 0.84. `length` grows along the copied path.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_SUFFIX
from paceline.workers.drafters.base import Context, Drafter, register

IntArray = npt.NDArray[np.int32]

MIN_MATCH = 2
"""Shortest suffix worth looking up: the index is kept by pairs of tokens."""
NOVELTY = 6.0
"""Unseen continuations per occurrence of a match of one token; a match of m tokens has 1/m of them."""

_MAX_MATCH = 64
"""Longer matches count as this long. Of several occurrences this much alike only the latest is kept."""
_MAX_VISITS = 96
"""Nodes looked at in one search or insertion: bounds the cost of texts made to unbalance a tree."""
_MAX_MATCHES = 3
"""Lengths of match that one draft is made from."""
_ENOUGH = 24
"""A match of this length is followed alone: shorter ones would change little."""
_MAX_ENDS = 8
"""Occurrences that one search returns, the longest and latest ones: 16 gain 1% of tokens and cost 15% of time."""
_MAX_CONTEXT = 32_768
"""Tokens of a stream that are indexed when it is opened: its last ones."""
_WORK_PER_CALL = 32_768
"""Nodes visited and tokens indexed by one call of a drafter: 10 to 20 ms. The rest waits for the next call."""
_STORE_WORK_PER_CLOSE = 1024
"""The same for a finished output when its stream closes: about 0.6 ms."""
_STORE_WORK_PER_STREAM = 32
"""The same for what is left of finished outputs, in each step of each stream: about 20 us, more than it adds."""

_Past = tuple[list[int], int]
"""Tokens that once followed, and how many occurrences that stands for."""
_Source = tuple[int, list[_Past]]
"""Length of a match, and what followed it."""


class Match(NamedTuple):
    """All known occurrences of one suffix that another text shares with `tokens`."""

    length: int
    tokens: array[int]
    ends: list[tuple[int, int]]
    """Index of each occurrence's last token and how many occurrences it stands for."""

    def pasts(self, last: int, num: int) -> list[_Past]:
        """What followed, up to `num` tokens of it, each with its occurrences; the latest counts twice.

        `last` is the index of the suffix itself where it is part of `tokens`, else -1: a copy that reaches it goes
        on in circles.
        """
        latest = max(self.ends)[0]
        pasts: dict[bytes, tuple[list[int], int]] = {}
        for end, count in self.ends:
            follow = self.tokens[end + 1 : end + 1 + num]
            if last < 0:
                if min(follow) < 0:  # that text ended
                    del follow[next(at for at, token in enumerate(follow) if token < 0) :]
            elif end + num > last:
                follow = follow[: last - end] * (num // (last - end) + 1)
                del follow[num:]
            key = follow.tobytes()
            before = pasts[key][1] if key in pasts else 0
            pasts[key] = (follow.tolist(), before + count + (end == latest))
        return list(pasts.values())


class History:
    """Texts, each behind a separator, and where every context of two tokens or more came up in them.

    Indices count from the oldest token in memory; links are distances back, so dropping old text moves nothing.
    Costs 16 bytes a token and about 110 for each different pair of tokens.
    """

    def __init__(self, *, max_match: int = _MAX_MATCH, max_visits: int = _MAX_VISITS) -> None:
        self.tokens = array("i")
        self._links = array("i")
        """Two per token: distance back to the child that reads smaller, and to the one that reads larger."""
        self._counts = array("i")
        self._newest: dict[int, int] = {}
        """Pair of tokens -> absolute position of the root of its tree."""
        self._base = 0
        """Absolute position of index 0."""
        self._first = 0
        """Tokens before this index are forgotten."""
        self._next = 0
        """First index that is not in a tree yet."""
        self._max_match = max_match
        self._max_visits = max_visits

    def __len__(self) -> int:
        return len(self.tokens) - self._first

    @property
    def is_indexed(self) -> bool:
        """Whether every token whose successor is known can be found."""
        return self._next >= len(self.tokens) - 1

    def begin(self, separator: int) -> None:
        """Start a text. The separator is negative and differs from all others in memory, so no match crosses it."""
        self.extend(np.array([separator], np.int32))

    def extend(self, token_ids: IntArray) -> None:
        """Add tokens to the last text. They cost nothing until they are indexed."""
        num = len(token_ids)
        self.tokens.frombytes(np.ascontiguousarray(token_ids, np.int32).tobytes())
        self._links.frombytes(bytes(8 * num))
        self._counts.frombytes(bytes(4 * num))

    def index(self, work: int) -> int:
        """Put tokens in their trees until all are or the work is spent; what is left of it.

        The new root takes the old tree apart: nodes met on the way down to its own place go to its smaller or to
        its larger side, each with the half of its subtree that lies away from that place.
        """
        tokens, links, counts, newest = self.tokens, self._links, self._counts, self._newest
        base, first, max_match = self._base, self._first, self._max_match
        at, stop = self._next, len(tokens) - 1
        while at < stop and work > 0:
            work -= 1
            before, here, after = tokens[at - 1] if at else -1, tokens[at], tokens[at + 1]
            if (before | here | after) < 0:  # nothing to match, or nothing to copy
                at += 1
                continue
            pair = before << 32 | here
            node = newest.get(pair, -1) - base
            newest[pair] = base + at
            counts[at] = 1
            # Where the next node that reads smaller (larger) is to be hung, and how long the last one's match is.
            smaller, larger = 2 * at, 2 * at + 1
            short, long = MIN_MATCH, MIN_MATCH
            visits = self._max_visits
            while node >= first and visits:
                visits -= 1
                length = short if short < long else long  # noqa: FURB136 (a call costs more)
                theirs, ours = tokens[node - length], tokens[at - length]
                if theirs == ours and length < max_match:
                    length = _common(tokens, node, tokens, at, length + 1, max_match)
                    theirs, ours = tokens[node - length], tokens[at - length]
                link = 2 * node
                if length >= max_match:  # the same context: take the place of the older one
                    if tokens[node + 1] == after:
                        counts[at] += counts[node]
                    links[smaller] = links[link] and (smaller >> 1) - node + links[link]
                    links[larger] = links[link + 1] and (larger >> 1) - node + links[link + 1]
                    break
                if theirs < ours:
                    links[smaller] = (smaller >> 1) - node
                    smaller, short = link + 1, length
                    node = node - links[smaller] if links[smaller] else -1
                else:
                    links[larger] = (larger >> 1) - node
                    larger, long = link, length
                    node = node - links[larger] if links[larger] else -1
            else:
                links[smaller] = links[larger] = 0
            work -= self._max_visits - visits
            at += 1
        self._next = at
        return work

    def matches(self, text: array[int], at: int, min_match: int = MIN_MATCH) -> list[Match]:
        """The longest matches with `text` up to index `at`, longest first; each has all ends of those before it.

        Best first: a subtree away from `text` matches no longer than its parent, and is older. So nodes come out
        by length of match, and equal ones by age.
        """
        if at < 1:
            return []
        tokens, links, counts = self.tokens, self._links, self._counts
        first, max_match, visits = self._first, self._max_match, self._max_visits
        root = self._newest.get(text[at - 1] << 32 | text[at], -1) - self._base
        found: list[Match] = []
        ends: list[tuple[int, int]] = []
        current = 0
        # (-longest possible match, -node, match of the neighbour to its left, to its right); left 0: it is exact.
        heap = [(-max_match, -root, MIN_MATCH, MIN_MATCH)] if root >= first else []
        while heap and len(ends) < _MAX_ENDS:
            bound, node, left, right = heappop(heap)
            if -bound < min_match:
                break
            node = -node
            if left == 0:
                if -bound != current:
                    if current:
                        found.append(Match(current, tokens, ends.copy()))
                        if len(found) == _MAX_MATCHES or current >= _ENOUGH:
                            return found
                    current = -bound
                ends.append((node, counts[node]))
                continue
            if visits == 0:
                continue
            visits -= 1
            length = left if left < right else right  # noqa: FURB136
            if length < max_match and tokens[node - length] == text[at - length]:
                length = _common(tokens, node, text, at, length + 1, max_match)
            link = 2 * node
            is_smaller = tokens[node - length] < text[at - length]
            is_same = length >= max_match
            heappush(heap, (-length, -node, 0, 0))
            child = node - links[link]
            if first <= child < node:
                heappush(heap, (-length if is_smaller and not is_same else bound, -child, left, length))
            child = node - links[link + 1]
            if first <= child < node:
                heappush(heap, (bound if is_smaller or is_same else -length, -child, length, right))
        if ends:
            found.append(Match(current, tokens, ends.copy()))
        return found

    def forget(self, num: int) -> None:
        """Drop the oldest tokens: whole texts, separators included."""
        tokens = self.tokens
        for at in range(max(1, self._first), self._first + num):
            pair = tokens[at - 1] << 32 | tokens[at]
            if self._newest.get(pair) == self._base + at:
                del self._newest[pair]
        self._first += num
        self._next = max(self._next, self._first)
        if 2 * self._first > len(tokens):
            del self.tokens[: self._first]
            del self._links[: 2 * self._first]
            del self._counts[: self._first]
            self._base += self._first
            self._next -= self._first
            self._first = 0


def _common(one: array[int], i: int, two: array[int], j: int, length: int, limit: int) -> int:
    """How many tokens up to `one[i]` and up to `two[j]` are equal, `length` of them known to be; `limit` at most."""
    few = min(limit, length + 6)
    while length < few and one[i - length] == two[j - length]:
        length += 1
    if length < few:
        return length
    while (
        length + 16 <= limit
        and i - length > 15
        and j - length > 15
        and one[i - length - 15 : i - length + 1] == two[j - length - 15 : j - length + 1]
    ):
        length += 16
    while length < limit and one[i - length] == two[j - length]:
        length += 1
    return length


class FinishedOutputs:
    """Outputs of streams that ended, by tenant; the oldest of all go first when there are too many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._histories: dict[str, History] = {}
        self._unindexed: deque[History] = deque()
        self._oldest: deque[tuple[str, int]] = deque()
        self._num_added = 0

    def add(self, token_ids: IntArray, tenant: str = "") -> None:
        """Keep an output. It can be found once `index` came to it. With room for nothing, nothing is kept."""
        if self._max_tokens <= MIN_MATCH:
            return
        token_ids = token_ids[: self._max_tokens - 1]
        if len(token_ids) <= MIN_MATCH:
            return
        history = self._histories.setdefault(tenant, History())
        if history.is_indexed:
            self._unindexed.append(history)
        # -1 is the separator of a stream's own history.
        history.begin(-2 - self._num_added % (1 << 30))
        history.extend(token_ids)
        self._num_added += 1
        self._oldest.append((tenant, len(token_ids) + 1))
        self.num_tokens += len(token_ids) + 1
        while self.num_tokens > self._max_tokens:
            owner, num = self._oldest.popleft()
            self.num_tokens -= num
            self._histories[owner].forget(num)
            if len(self._histories[owner]) == 0:
                del self._histories[owner]

    def index(self, work: int) -> None:
        """Make outputs findable until all are or the work is spent."""
        while work > 0 and self._unindexed:
            work = self._unindexed[0].index(work)
            if self._unindexed[0].is_indexed:
                self._unindexed.popleft()

    def matches(self, text: array[int], at: int, tenant: str = "", min_match: int = MIN_MATCH) -> list[Match]:
        """The longest matches with `text` up to index `at` among this tenant's outputs."""
        history = self._histories.get(tenant)
        return history.matches(text, at, min_match) if history is not None else []


@dataclass(slots=True)
class _Draft:
    """Nodes of one tree in the order they were chosen: by the probability of the whole path to them."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    @classmethod
    def copied(cls, sources: list[_Source], max_nodes: int) -> _Draft:
        """The nodes most likely to be accepted among all that followed these matches."""
        draft = cls([], [], [])
        tokens, parents, scores = draft.tokens, draft.parents, draft.scores
        # (-probability of the path, tie-break, token, parent, depth, score, what goes through it)
        frontier: list[tuple[float, int, int, int, int, float, list[_Source]]] = []
        serial = 0
        path, node, depth, live = 1.0, -1, 0, sources
        while True:
            if len(live) == 1 and len(live[0][1]) == 1:  # one past to copy: no choice, no heap
                length, ((past, hits),) = live[0]
                bar = -frontier[0][0] if frontier else 0.0
                while len(tokens) < max_nodes and depth < len(past):
                    score = hits / (hits + NOVELTY / (length + depth))
                    path *= score
                    if path < bar:
                        serial += 1
                        heappush(frontier, (-path, serial, past[depth], node, depth, score, live))
                        break
                    tokens.append(past[depth])
                    parents.append(node)
                    scores.append(score)
                    node = len(tokens) - 1
                    depth += 1
            else:
                for token, (score, going) in _followers(live, depth).items():
                    serial += 1
                    heappush(frontier, (-path * score, serial, token, node, depth, score, going))
            if not frontier or len(tokens) >= max_nodes:
                return draft
            path, _, token, parent, depth, score, live = heappop(frontier)
            path = -path
            tokens.append(token)
            parents.append(parent)
            scores.append(score)
            node = len(tokens) - 1
            depth += 1

    def spine_first(self) -> _Draft:
        """The most likely path first, in order of depth, then the others as they were chosen."""
        best: dict[int, int] = {}
        for node, parent in enumerate(self.parents):  # the likeliest child was chosen first
            best.setdefault(parent, node)
        spine: list[int] = []
        node = best.get(-1, -1)
        while node >= 0:
            spine.append(node)
            node = best.get(node, -1)
        if len(spine) == spine[-1] + 1:
            return self
        on_spine = set(spine)
        order = spine + [node for node in range(len(self.tokens)) if node not in on_spine]
        where = {old: new for new, old in enumerate(order)}
        where[-1] = -1
        return _Draft(
            [self.tokens[node] for node in order],
            [where[self.parents[node]] for node in order],
            [self.scores[node] for node in order],
        )


def _followers(live: list[_Source], depth: int) -> dict[int, tuple[float, list[_Source]]]:
    """Each token that comes next in these pasts: its estimate, and the pasts that go through it."""
    found: dict[int, tuple[float, list[_Source]]] = {}
    for length, pasts in live:
        groups: dict[int, list[_Past]] = {}
        total = 0
        for pair in pasts:
            past, count = pair
            total += count
            token = past[depth] if depth < len(past) else -1
            if token in groups:
                groups[token].append(pair)
            else:
                groups[token] = [pair]
        groups.pop(-1, None)
        expected = total + NOVELTY / (length + depth)
        for token, group in groups.items():
            hits = group[0][1] if len(group) == 1 else sum([count for _, count in group])
            score = hits / expected
            if token not in found:
                found[token] = (score, [(length, group)])
                continue
            best, others = found[token]
            if len(group) == 1 and len(others) == 1 and others[0][1][0][0] == group[0][0]:
                # The same past under another length: the more promising one speaks for both.
                if score > best:
                    found[token] = (score, [(length, group)])
                continue
            others.append((length, group))
            if score > best:
                found[token] = (score, others)
    return found


@dataclass(slots=True)
class _Indexed:
    """What is indexed of one stream."""

    history: History
    num_known: int


class SuffixDrafter(Drafter):
    """Drafts what followed the same words before. In process, on the CPU; all methods on the engine thread."""

    name = "suffix"
    source = SOURCE_SUFFIX
    is_free = True

    def __init__(
        self,
        *,
        max_nodes: int = 16,
        max_store_tokens: int = 1_000_000,
        tenant_of: Callable[[Stream], str] = lambda stream: "",
    ) -> None:
        assert max_nodes >= 1, f"max_nodes={max_nodes}: expected 1 or more"
        self.store = FinishedOutputs(max_store_tokens)
        self._max_nodes = max_nodes
        self._tenant_of = tenant_of
        self._indexed: dict[str, _Indexed | None] = {}
        """None until the first draft is asked for: a stream that never drafts is never indexed."""

    def open(self, stream: Stream) -> None:
        self._indexed[stream.key] = None

    def observe(self, streams: Sequence[Stream]) -> None:
        work = _WORK_PER_CALL
        for stream in streams:
            past = self._indexed.get(stream.key)
            if past is not None:
                work = self._catch_up(stream, past, work)
        self.store.index(_STORE_WORK_PER_STREAM * len(streams))

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        work = _WORK_PER_CALL
        trees: list[Tree | None] = []
        for stream in streams:
            past = self._indexed.get(stream.key)
            if past is None:
                if stream.key not in self._indexed:
                    trees.append(None)
                    continue
                past = _Indexed(History(), max(0, stream.num_tokens - _MAX_CONTEXT))
                past.history.begin(-1)
                self._indexed[stream.key] = past
            work = self._catch_up(stream, past, work)
            trees.append(self._draft(stream, past.history) if past.history.is_indexed else None)
        return trees

    def close(self, stream: Stream) -> None:
        if stream.key in self._indexed:
            del self._indexed[stream.key]
            self.store.add(stream.token_ids[stream.num_prompt :], self._tenant_of(stream))
            self.store.index(_STORE_WORK_PER_CLOSE)

    def version(self, stream: Stream) -> str:
        return ""

    def _catch_up(self, stream: Stream, past: _Indexed, work: int) -> int:
        """Index the stream's new tokens as far as the work allows; what is left of it."""
        if past.num_known < stream.num_tokens:
            past.history.extend(stream.buffer[past.num_known : stream.num_tokens])
            past.num_known = stream.num_tokens
        return work if past.history.is_indexed else past.history.index(work)

    def _draft(self, stream: Stream, history: History) -> Tree | None:
        """The tree of the longest matches, the stream's own before others of the same length."""
        text = history.tokens
        at = len(text) - 1
        matches = history.matches(text, at)
        if not matches or matches[0].length < _ENOUGH:
            shortest = matches[-1].length + 1 if len(matches) == _MAX_MATCHES else MIN_MATCH
            others = self.store.matches(text, at, self._tenant_of(stream), shortest)
            if others:
                matches = sorted(matches + others, key=lambda match: -match.length)[:_MAX_MATCHES]
        if not matches:
            return None
        if matches[0].length >= _ENOUGH:
            del matches[1:]
        sources = [
            (match.length, match.pasts(at if match.tokens is text else -1, self._max_nodes))
            for match in matches
        ]
        draft = _Draft.copied(sources, self._max_nodes)
        draft = draft.spine_first()
        return Tree.build(text[at], draft.tokens, draft.parents, SOURCE_SUFFIX, draft.scores)


@register("suffix")
def _make(context: Context) -> Drafter:
    # No store of finished answers: nothing of a request may outlive it unless its tenant agreed to that.
    return SuffixDrafter(max_store_tokens=0)
