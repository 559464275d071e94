"""The folders of a target and its draft -> nothing if they share one tokenizer, or an error naming what differs.

Drafts travel as token ids. With another tokenizer every id would still be legal, every draft wrong, and nothing
would say why: texts stay right (P1) and only speed is lost, so it is looked at before anything starts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from paceline.cluster.errors import ModelError


def check_pair(target: Path, draft: Path) -> None:
    """The same tokens under the same ids, the same merges, and enough rows in both models.

    Tables of embeddings may have different numbers of rows: families pad them to multiples that differ by size. What
    the rows have to cover is the tokenizer.

    Raises:
        ModelError: names both folders and the first token that differs, or the model whose vocabulary is too small.
    """
    ours, theirs = read_tokens(target), read_tokens(draft)
    for folder, content in ((target, ours), (draft, theirs)):
        _check_rows(folder, content)
    if _digest(ours) == _digest(theirs):
        return
    raise ModelError(
        f"model.target={target} and model.draft={draft}: expected one tokenizer, but {_difference(ours, theirs)}"
    )


def read_tokens(folder: Path) -> tuple[dict[int, str], list[str]]:
    """tokenizer.json -> (id -> token, added ones included; merges in order, "left right").

    Raises:
        ModelError: the file is missing or is no tokenizer.
    """
    path = folder / "tokenizer.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        model = tree["model"]
        tokens = _vocabulary(model["vocab"])
        tokens.update({int(item["id"]): str(item["content"]) for item in tree.get("added_tokens") or []})
        merges = [item if isinstance(item, str) else " ".join(item) for item in model.get("merges") or []]
    except FileNotFoundError:
        raise ModelError(f"model folder {folder}: no tokenizer.json there") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a readable tokenizer: {error!r}") from error
    return tokens, merges


def _vocabulary(vocab: Any) -> dict[int, str]:
    """{token: id} of BPE and word models, or [[token, score], ...] of unigram models."""
    if isinstance(vocab, dict):
        return {int(id): str(token) for token, id in vocab.items()}
    return {id: str(token) for id, (token, _) in enumerate(vocab)}


def _digest(content: tuple[dict[int, str], list[str]]) -> str:
    tokens, merges = content
    text = json.dumps([sorted(tokens.items()), merges])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _difference(ours: tuple[dict[int, str], list[str]], theirs: tuple[dict[int, str], list[str]]) -> str:
    """The first token, else the first merge that is not the same."""
    for id in sorted(ours[0].keys() | theirs[0].keys()):
        a, b = ours[0].get(id), theirs[0].get(id)
        if a != b:
            sizes = f"{len(ours[0])} and {len(theirs[0])} tokens"
            return f"token {id} is {_shown(a)} in the target's and {_shown(b)} in the draft's ({sizes})"
    pairs = zip([*ours[1], None], [*theirs[1], None], strict=False)
    index, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"merge {index} is {_shown(a)} in the target's and {_shown(b)} in the draft's"


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(text)


def _check_rows(folder: Path, content: tuple[dict[int, str], list[str]]) -> None:
    """Every id of the tokenizer has a row in the model's embedding."""
    path = folder / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        rows = tree.get("vocab_size", (tree.get("text_config") or {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: expected a JSON object: {error}") from error
    needed = max(content[0], default=-1) + 1
    if rows is not None and (not isinstance(rows, int) or rows < needed):  # None: the family's default
        raise ModelError(
            f"{path}: vocab_size={rows!r}: expected at least {needed}, as many as its tokenizer.json has"
        )
