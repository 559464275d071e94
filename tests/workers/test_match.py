"""Trees and decisions -> the path a naive walk finds, and the target's own law over many seeds."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import oracle
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.workers.sampling import SamplingRows, perturb
from paceline.workers.verifiers.match import match

VOCAB = 4
NUM_SEEDS = 30_000
HORIZON = 6  # positions that can be decided: three tokens, with drafts reaching past them

Rule = Callable[[Tree, np.ndarray], tuple[list[int], int]]


def naive_walk(tokens: list[int], parents: list[int], decided: list[int]) -> tuple[tuple[int, ...], int]:
    """Follow the first child that carries the decided token, by recursion over plain lists."""

    def below(node: int) -> tuple[tuple[int, ...], int]:
        for child in range(len(tokens)):
            if parents[child] == node and tokens[child] == decided[node]:
                path, emitted = below(child)
                return (child, *path), emitted
        return (), decided[node]

    return below(0)


@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
def test_match_equals_a_naive_walk_on_all_small_trees(num_drafted: int) -> None:
    """Every topology, every token of two, every decision: the whole space."""
    num = num_drafted + 1
    for parents in itertools.product(*(range(-1, node) for node in range(num_drafted))):
        for tokens in itertools.product((0, 1), repeat=num_drafted):
            tree = Tree.build(0, tokens, parents)
            for decided in itertools.product((0, 1), repeat=num):
                verdict = match(tree, np.array(decided))

                assert (verdict.path, verdict.emitted) == naive_walk(
                    tree.tokens.tolist(), tree.parents.tolist(), list(decided)
                )


def test_match_equals_a_naive_walk_on_larger_random_trees() -> None:
    """Up to 20 nodes over three tokens, duplicates among siblings included."""
    generator = np.random.default_rng(0)
    lengths = []
    for _ in range(1500):
        num = int(generator.integers(0, 20))
        parents = [int(generator.integers(-1, node)) for node in range(num)]
        tree = Tree.build(1, generator.integers(0, 3, num).tolist(), parents)
        decided = generator.integers(0, 3, num + 1)
        verdict = match(tree, decided)
        lengths.append(len(verdict.path))

        assert (verdict.path, verdict.emitted) == naive_walk(
            tree.tokens.tolist(), tree.parents.tolist(), decided.tolist()
        )
    assert max(lengths) >= 4


def test_the_path_is_what_the_target_says_node_by_node() -> None:
    """Whatever the tree, path tokens are the decisions of their parents, and no longer path exists."""
    generator = np.random.default_rng(1)
    for _ in range(300):
        num = int(generator.integers(1, 12))
        parents = [int(generator.integers(-1, node)) for node in range(num)]
        tree = Tree.build(1, generator.integers(0, 3, num).tolist(), parents)
        decided = generator.integers(0, 3, num + 1)
        verdict = match(tree, decided)
        at = 0
        for node in verdict.path:
            assert tree.parents[node] == at and tree.tokens[node] == decided[at]
            at = node
        assert verdict.emitted == decided[at]
        assert not ((tree.parents == at) & (tree.tokens == decided[at])).any()


# --- the law of what is emitted -------------------------------------------------------------------------

TABLE = np.random.default_rng(8).dirichlet(np.full(VOCAB, 1.2), VOCAB)
"""TABLE[a, b]: probability that b follows a."""


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    """[seed, position, previous token, token]: perturbed scores of the table's rows, from the product's code."""
    out = np.empty((NUM_SEEDS, HORIZON, VOCAB, VOCAB), np.float32)
    logits = torch.from_numpy(np.log(TABLE)).float()
    samplings = [Sampling(seed) for seed in range(NUM_SEEDS)]
    for position in range(HORIZON):
        rows = SamplingRows.build(samplings, [1] * NUM_SEEDS, np.full(NUM_SEEDS, position))
        noise = perturb(torch.zeros(NUM_SEEDS, VOCAB), rows)
        out[:, position] = (logits[None] + noise[:, None]).numpy()
    return out


def random_trees(root: int, count: int) -> list[Tree]:
    """Trees of up to six drafted nodes behind a root, at most three deep."""
    generator = np.random.default_rng(root)
    trees = []
    for _ in range(count):
        num = int(generator.integers(0, 7))
        parents = [int(generator.integers(-1, node)) for node in range(num)]
        trees.append(Tree.build(root, generator.integers(0, VOCAB, num).tolist(), parents).trimmed(7, 3))
    return trees


def law(scores: np.ndarray, rule: Rule) -> tuple[float, float]:
    """p-value of the joint law of the first three tokens, and tokens accepted per step."""
    trees = [random_trees(root, 200) for root in range(VOCAB)]
    counts = np.zeros((VOCAB, VOCAB, VOCAB), np.int64)
    accepted = num_steps = 0
    for seed in range(NUM_SEEDS):
        text = [0]
        while len(text) < 4:
            tree = trees[text[-1]][(seed * 7 + len(text)) % 200]
            # The node at depth d decides the token of position len(text) + d; text[0] is the prompt.
            path, emitted = rule(tree, scores[seed, len(text) - 1 + tree.depths, tree.tokens])
            text += [*path, emitted]
            accepted += len(path)
            num_steps += 1
        counts[tuple(text[1:4])] += 1
    exact = TABLE[0][:, None, None] * TABLE[:, :, None] * TABLE[None, :, :]
    return oracle.g_test(counts, exact), accepted / num_steps


def by_match(tree: Tree, scores_NV: np.ndarray) -> tuple[list[int], int]:
    """The product's rule."""
    verdict = match(tree, scores_NV.argmax(-1))
    return [int(tree.tokens[node]) for node in verdict.path], verdict.emitted


def by_top_two(tree: Tree, scores_NV: np.ndarray) -> tuple[list[int], int]:
    """A generous rule: a child whose token is the first or second choice is good enough."""
    at, path = 0, []
    while True:
        good = np.argsort(scores_NV[at])[-2:]
        children = [i for i in range(at + 1, len(tree)) if tree.parents[i] == at and tree.tokens[i] in good]
        if not children:
            return path, int(scores_NV[at].argmax())
        at = children[0]
        path.append(int(tree.tokens[at]))


def test_the_joint_law_of_three_tokens_is_the_targets(scores: np.ndarray) -> None:
    """Random trees, 30k seeds: speculation leaves no trace in the distribution."""
    p_value, accepted = law(scores, by_match)

    assert p_value > 1e-4
    assert accepted > 0.3


def test_a_generous_verifier_fails_the_same_test(scores: np.ndarray) -> None:
    """Power check: accepting second choices is found out."""
    p_value, accepted = law(scores, by_top_two)

    assert p_value < 1e-4
    assert accepted > 0.3


def test_the_text_of_a_seed_does_not_depend_on_the_trees(scores: np.ndarray) -> None:
    """Drafter invariance: two unrelated tree sequences and none at all emit the same tokens."""
    trees = [random_trees(root, 100) for root in range(VOCAB)]
    for seed in range(500):
        texts = []
        for stride in (0, 3, 11):
            text = [0]
            while len(text) < 4:
                tree = trees[text[-1]][(seed * stride + len(text)) % 100]
                if stride == 0:
                    tree = Tree.root_only(text[-1])
                path, emitted = by_match(tree, scores[seed, len(text) - 1 + tree.depths, tree.tokens])
                text += [*path, emitted]
            texts.append(text[:4])

        assert texts[0] == texts[1] == texts[2]
