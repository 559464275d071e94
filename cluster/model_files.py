"""A model folder -> nothing if its files are whole, or one error that names the file and what is wrong with it.

Runs before transformers opens anything: what it says of a damaged file is either wrong (a pickle has a "too large
header") or nothing at all. Only headers are read here, no tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

from paceline.cluster.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_NEVER = "pickled weights are never loaded, since reading one runs code; save the model as safetensors"


def check_model_files(folder: Path) -> None:
    """config.json is an object; the weights are whole safetensors files.

    Raises:
        ModelError: names the file, what was found and what was expected.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder}: no config.json there")
    read_object(folder / "config.json")
    for file in weight_files(folder):
        _check_safetensors(file)


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        ModelError: it cannot be read or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, all of which exist.

    Raises:
        ModelError: there are none, or the index names one that is not there.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        found = f"found {pickled[0]}; {_NEVER}" if pickled else "found neither"
        raise ModelError(f"model folder {folder}: expected {WEIGHTS} or {INDEX}, {found}")
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: weight_map: expected an object of tensor names and files, got {shards!r}")
    for tensor, name in shards.items():
        # A name with a folder in it could reach outside of the model.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(
                f"{index}: weight_map[{tensor!r}]={name!r}: expected the name of a file beside it"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{index}: weight_map[{tensor!r}]={name!r}: no such file in {folder}")
    return [folder / name for name in sorted(set(shards.values()))]


def _check_safetensors(path: Path) -> None:
    """8 bytes with the header's length, a JSON header, then exactly the bytes that the header promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        # A header may be 128 bytes long, or 0x4B50: only what cannot be a safetensors header is taken for a pickle.
        if start[8:9] != b"{" and start.startswith((b"PK", b"\x80")):
            raise ModelError(f"{path}: expected safetensors, found a pickle; {_NEVER}")
        if start.startswith(b"version https://git-lfs"):
            raise ModelError(
                f"{path}: expected safetensors, found a git-lfs pointer; `git lfs pull` gets the file"
            )
        if size < 8:
            raise ModelError(f"{path}: expected safetensors, found {size} bytes: the download was cut off")
        (num_header,) = struct.unpack("<Q", start[:8])
        limit = min(size - 8, _MAX_HEADER_BYTES)
        if num_header > limit:
            raise ModelError(
                f"{path}: header length {num_header}: expected 2..{limit} in a file of {size} bytes; "
                "it is cut off or no safetensors"
            )
        file.seek(8)
        header = file.read(num_header)
    num_data = _data_bytes(path, header)
    if 8 + num_header + num_data != size:
        raise ModelError(
            f"{path}: expected {8 + num_header + num_data} bytes as its header promises, found {size}; "
            "copy or download it again"
        )


def _data_bytes(path: Path, header: bytes) -> int:
    """Bytes behind the header: the largest end of all tensors."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        ends = [0]
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end or math.prod(entry["shape"]) < 0:
                raise ValueError(f"{name}: data_offsets={entry['data_offsets']}, shape={entry['shape']}")
            ends.append(int(end))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: the header is not that of a safetensors file: {error!r}") from error
    return max(ends)


def weights_version(folder: Path) -> str:
    """12 hex digits of the SHA-256 over configuration and weights: the name of a version, wherever it lies."""
    state = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return state.hexdigest()[:12]


def served_version(folder: Path, *, int8_weights: bool = False) -> str:
    """The same of what is served from a folder: rounded weights are another target, whose KV and texts differ."""
    version = weights_version(folder)
    return hashlib.sha256(f"{version} int8".encode()).hexdigest()[:12] if int8_weights else version


def file_sha256(path: Path) -> str:
    """Of a whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
