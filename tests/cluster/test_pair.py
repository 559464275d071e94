"""Two model folders -> one tokenizer, or an error that names the first token that differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundled import TARGET
from paceline.cluster.config import ModelConfig, model_folder
from paceline.cluster.errors import ModelError
from paceline.cluster.pair import check_pair, read_tokens

DRAFT = model_folder(ModelConfig().draft)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the bundled draft without its weights."""
    folder = tmp_path / "draft"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DRAFT / name, folder / name)
    return folder


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite tokenizer.json."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    change(tree)
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def mismatch(draft: Path) -> str:
    """What the pair is refused with; both folders are named."""
    with pytest.raises(ModelError) as caught:
        check_pair(TARGET, draft)
    assert str(draft) in str(caught.value)
    return str(caught.value)


def test_the_bundled_pair_shares_its_tokenizer() -> None:
    """And a hash that says so."""
    check_pair(TARGET, DRAFT)

    assert read_tokens(TARGET) == read_tokens(DRAFT)


def test_what_does_not_change_the_tokens_is_no_difference(other: Path) -> None:
    """Layout of the file, version, padding, processors, order of the vocabulary, how merges are written."""

    def rewrite(tree: dict[str, Any]) -> None:
        tree.update(version="9.9", padding=None, truncation=None, post_processor=None, decoder=None)
        tree["model"]["vocab"] = dict(reversed(tree["model"]["vocab"].items()))
        merges = tree["model"]["merges"]
        tree["model"]["merges"] = [m.split(" ") if isinstance(m, str) else " ".join(m) for m in merges]

    edit_tokenizer(other, rewrite)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**config, "vocab_size": config["vocab_size"] + 128})
    )  # padded

    check_pair(TARGET, other)


def test_the_first_token_that_differs_is_named(other: Path) -> None:
    """Two tokens swapped: the lower id, with both texts."""

    def swap(tree: dict[str, Any]) -> None:
        vocab = tree["model"]["vocab"]
        by_id = {id: token for token, id in vocab.items()}
        vocab[by_id[300]], vocab[by_id[301]] = 301, 300

    before = {
        id: token
        for token, id in json.loads((other / "tokenizer.json").read_text())["model"]["vocab"].items()
    }
    edit_tokenizer(other, swap)
    message = mismatch(other)

    assert f"token 300 is {before[300]!r} in the target's and {before[301]!r} in the draft's" in message
    assert str(TARGET) in message


def test_missing_tokens_and_other_merges_are_named(other: Path) -> None:
    """A smaller vocabulary; the same vocabulary split in another way."""
    edit_tokenizer(other, lambda tree: tree["model"]["merges"].reverse())
    assert "merge 0 is" in mismatch(other)

    edit_tokenizer(other, lambda tree: tree["model"]["vocab"].popitem())
    assert "missing in the draft's" in mismatch(other)


def test_an_added_token_counts(other: Path) -> None:
    """Control tokens are tokens."""
    edit_tokenizer(other, lambda tree: tree["added_tokens"][1].update(content="<|other|>"))

    assert "'<|other|>' in the draft's" in mismatch(other)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": {"vocab": 3}}'])
def test_a_draft_without_a_readable_tokenizer_is_named(other: Path, content: str | None) -> None:
    """Missing, no JSON, no tokenizer."""
    (other / "tokenizer.json").unlink()
    if content is not None:
        (other / "tokenizer.json").write_text(content)

    assert "tokenizer" in mismatch(other)


def test_a_model_with_fewer_rows_than_tokens_is_named(other: Path) -> None:
    """Ids without an embedding."""
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))

    assert f"vocab_size=100: expected at least {len(read_tokens(TARGET)[0])}" in mismatch(other)
