"""A trained draft's folder -> a published version on `learning.storage`; its reference -> a folder that was checked.

    drafts/<version>/config.json, model.safetensors, card.json, tokenizer.json, ...
    drafts/<version>/manifest.json    name, bytes and SHA-256 of each of them

A version is published when its manifest is there. On a disk the whole folder appears in one move; on other storages, where
folders cannot be moved in one go, the manifest is written last. So a reader sees a whole version or none.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.cluster.errors import ConfigError, ModelError, PacelineError, StorageError
from paceline.cluster.learning import storage
from paceline.cluster.learning.storage import UNFINISHED, FileSystem
from paceline.cluster.model_files import WEIGHTS, check_model_files, file_sha256, weights_version
from paceline.cluster.types import DraftRef

MANIFEST = "manifest.json"
_JSON_BYTES = 64 << 20
_WEIGHTS_BYTES = 64 << 30
FILES: Mapping[str, int] = {
    "config.json": _JSON_BYTES,
    WEIGHTS: _WEIGHTS_BYTES,
    "adapter.safetensors": _WEIGHTS_BYTES,
    "card.json": _JSON_BYTES,
    "generation_config.json": _JSON_BYTES,
    "tokenizer.json": _JSON_BYTES,
    "tokenizer_config.json": _JSON_BYTES,
    "tokenizer.model": _JSON_BYTES,
    "special_tokens_map.json": _JSON_BYTES,
    "added_tokens.json": _JSON_BYTES,
    "vocab.json": _JSON_BYTES,
    "vocab.txt": _JSON_BYTES,
    "merges.txt": _JSON_BYTES,
    "chat_template.jinja": _JSON_BYTES,
    "chat_template.json": _JSON_BYTES,
}
"""What a version may consist of, and how many bytes of each. Nothing else is written, read or kept."""
_NEEDED = ("config.json", WEIGHTS)
_VERSION = re.compile(r"[0-9a-f]{12}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 4 << 20


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    files: dict[str, _File]


def publish(fs: FileSystem, root: str, folder: Path) -> DraftRef:
    """Copy a model's folder to `drafts/` under `root` of a storage. A version that is there already is left as it is.

    Raises:
        ModelError: a file is none of `FILES`, too large, a pickle, or no whole safetensors file.
        StorageError: the storage cannot be used.
    """
    check_model_files(folder)
    manifest = _manifest_of(folder)
    place = f"{_drafts(root)}/{manifest.version}"
    ref = DraftRef(manifest.version, str(fs.unstrip_protocol(place)), manifest.files[WEIGHTS].sha256)
    if _is_whole(fs, place, manifest):
        return ref
    with _storage("written", place):
        if isinstance(fs, LocalFileSystem):
            _put_local(Path(place), folder, manifest)
        else:
            _put(fs, place, folder, manifest)
    return ref


def fetch(ref: DraftRef, into: Path, *, max_bytes: int = _WEIGHTS_BYTES) -> Path:
    """Bring a version to `into`, where it stays: one that is there already is checked again, and not fetched.

    Returns:
        The folder: `into`/<version>.

    Raises:
        ModelError: it is not published, or is not what the reference says; what is wrong with which file.
        StorageError: the storage cannot be reached now.
    """
    _check_ref(ref)
    done = into / ref.version
    if done.is_dir():
        try:
            verify(done, ref)
            return done
        except ModelError:
            shutil.rmtree(done)  # a disk forgets, and other programs write
    fs, place = _open(ref)
    manifest = _read_manifest(fs, place, ref, max_bytes)
    into.mkdir(parents=True, exist_ok=True)
    partial = into / f".{ref.version}.{secrets.token_hex(4)}{UNFINISHED}"
    partial.mkdir(mode=0o700)
    try:
        for name, file in manifest.files.items():
            _download(fs, f"{place}/{name}", file, partial / name)
        (partial / MANIFEST).write_bytes(_encoded(manifest))
        verify(partial, ref)
        try:
            partial.rename(done)
        except OSError:  # somebody else was faster
            verify(done, ref)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return done


def verify(folder: Path, ref: DraftRef) -> None:
    """A folder holds exactly the version that a reference names.

    Raises:
        ModelError: what differs, in which file.
    """
    _check_ref(ref)
    check_model_files(folder)
    found = _manifest_of(folder)
    weights = found.files[WEIGHTS].sha256
    if ref.sha256 and weights != ref.sha256:
        raise ModelError(f"{folder / WEIGHTS}: sha256 is {weights}, expected {ref.sha256}")
    if found.version != ref.version:
        raise ModelError(
            f"{folder}: config.json and {WEIGHTS} are version {found.version}, expected {ref.version}"
        )
    if (folder / MANIFEST).is_file():
        said = _decoded((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
        for name in sorted(said.files.keys() | found.files.keys()):
            if said.files.get(name) != found.files.get(name):
                raise ModelError(f"{folder / name}: is not the file that {MANIFEST} names")


def remove(fs: FileSystem, root: str, version: str) -> None:
    """Make sure that a version is not published any more. Its manifest goes first: nobody begins to read it.

    Raises:
        ModelError: `version` is not the name of one.
        StorageError: the storage cannot be used.
    """
    if not _VERSION.fullmatch(version):
        raise ModelError(f"version {version[:80]!r}: expected 12 hex digits")
    place = f"{_drafts(root)}/{version}"
    storage.remove(fs, f"{place}/{MANIFEST}")
    with _storage("removed", place):
        fs.invalidate_cache()
        if fs.exists(place):
            fs.rm(place, recursive=True)


def published(fs: FileSystem, root: str) -> list[str]:
    """Versions that are published, by name.

    Raises:
        StorageError: the storage cannot be used.
    """
    names = [folder.rstrip("/").rpartition("/")[2] for folder in storage.folders(fs, _drafts(root))]
    versions = [name for name in names if _VERSION.fullmatch(name)]
    return sorted(
        v for v in versions if f"{_drafts(root)}/{v}/{MANIFEST}" in storage.files(fs, f"{_drafts(root)}/{v}")
    )


def sweep(fs: FileSystem, root: str, *, older_than: float) -> int:
    """Remove what killed publishers left behind before this time (Unix seconds); -> how many folders.

    Raises:
        StorageError: the storage cannot be used.
    """
    if not isinstance(fs, LocalFileSystem):
        return 0  # there they leave files of a version without a manifest, which the next attempt replaces
    left = [
        Path(folder)
        for folder in storage.folders(fs, _drafts(root))
        if folder.endswith(UNFINISHED) and Path(folder).stat().st_mtime < older_than
    ]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return len(left)


# --- a folder's content ---------------------------------------------------------------------------------


def _manifest_of(folder: Path) -> _Manifest:
    """Names, sizes and digests of all files of a folder, which has to hold nothing but `FILES`."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        limit = _limit(path.name, str(folder))
        if not path.is_file():
            raise ModelError(f"{path}: expected a file")
        if (size := path.stat().st_size) > limit:
            raise ModelError(f"{path}: {size} bytes, expected at most {limit}")
        files[path.name] = _File(size, file_sha256(path))
    for name in _NEEDED:
        if name not in files:
            raise ModelError(f"{folder}: no {name} there")
    return _Manifest(weights_version(folder), files)


def _limit(name: str, where: str) -> int:
    if name not in FILES:
        pickled = name.endswith((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))
        why = "pickles are never published or loaded, since reading one runs code; " if pickled else ""
        raise ModelError(
            f"{where}: {name[:80]!r} is no file of a version; {why}expected only {', '.join(FILES)}"
        )
    return FILES[name]


def _encoded(manifest: _Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def _decoded(data: bytes, where: str) -> _Manifest:
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ModelError(f"{where}: expected a list of files: {error}") from error
    for name, file in manifest.files.items():
        limit = _limit(name, where)
        if not 0 <= file.bytes <= limit or not _SHA256.fullmatch(file.sha256):
            raise ModelError(f"{where}: {name}: expected 0..{limit} bytes and a SHA-256, got {file}")
    for name in _NEEDED:
        if name not in manifest.files:
            raise ModelError(f"{where}: names no {name}")
    return manifest


# --- to storage -----------------------------------------------------------------------------------------


def _put_local(place: Path, folder: Path, manifest: _Manifest) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}{UNFINISHED}")
    partial.mkdir()
    try:
        for name in manifest.files:
            shutil.copyfile(folder / name, partial / name)
            _sync(partial / name)
        (partial / MANIFEST).write_bytes(_encoded(manifest))
        _sync(partial / MANIFEST)
        _check_copy(partial, manifest)
        if place.exists():  # damaged: out of the way first, a folder cannot be replaced by another in one go
            aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}{UNFINISHED}")
            place.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(place.parent)


def _check_copy(folder: Path, manifest: _Manifest) -> None:
    """Somebody may have written to the files while they were copied."""
    if _manifest_of(folder) != manifest:
        raise ModelError(f"version {manifest.version}: its files changed while it was being published")


def _put(fs: FileSystem, place: str, folder: Path, manifest: _Manifest) -> None:
    storage.remove(fs, f"{place}/{MANIFEST}")
    fs.makedirs(place, exist_ok=True)
    for name, file in manifest.files.items():
        state, size = hashlib.sha256(), 0
        with (folder / name).open("rb") as source, fs.open(f"{place}/{name}", "wb") as target:
            while chunk := source.read(_CHUNK):
                state.update(chunk)
                size += len(chunk)
                target.write(chunk)
        if (size, state.hexdigest()) != (file.bytes, file.sha256):
            raise ModelError(f"{folder / name}: changed while it was being published")
    fs.pipe_file(f"{place}/{MANIFEST}", _encoded(manifest))


def _is_whole(fs: FileSystem, place: str, manifest: _Manifest) -> bool:
    """Published already, by names and sizes; other digests of card or tokenizer do not make it another version."""
    sizes = {path.rpartition("/")[2]: size for path, size in storage.files(fs, place).items()}
    data = storage.read_whole(fs, f"{place}/{MANIFEST}") if MANIFEST in sizes else None
    try:
        there = None if data is None else _decoded(data, place)
    except ModelError:
        return False
    return (
        there is not None
        and there.version == manifest.version
        and all(there.files[name] == manifest.files[name] for name in _NEEDED)
        and all(sizes.get(name) == file.bytes for name, file in there.files.items())
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- from storage ---------------------------------------------------------------------------------------


def _check_ref(ref: DraftRef) -> None:
    """It comes from another process and becomes part of a path."""
    if not _VERSION.fullmatch(ref.version):
        raise ModelError(f"version {ref.version[:80]!r}: expected 12 hex digits")
    if ref.sha256 and not _SHA256.fullmatch(ref.sha256):
        raise ModelError(f"version {ref.version}: sha256 {ref.sha256[:80]!r}: expected 64 hex digits")


def _open(ref: DraftRef) -> tuple[FileSystem, str]:
    try:
        fs, place = url_to_fs(ref.url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"version {ref.version}: url {ref.url!r}: {error}") from error
    return fs, str(place).rstrip("/")


def _read_manifest(fs: FileSystem, place: str, ref: DraftRef, max_bytes: int) -> _Manifest:
    where = f"{place}/{MANIFEST}"
    sizes = {path.rpartition("/")[2]: size for path, size in storage.files(fs, place).items()}
    if MANIFEST not in sizes:
        raise ModelError(f"version {ref.version}: not published at {ref.url}: no {MANIFEST} there")
    for name in sizes:
        if name != MANIFEST:
            _limit(name, place)
    if sizes[MANIFEST] > _JSON_BYTES:
        raise ModelError(f"{where}: {sizes[MANIFEST]} bytes, expected at most {_JSON_BYTES}")
    manifest = _decoded(storage.read_whole(fs, where) or b"", where)
    total = sum(file.bytes for file in manifest.files.values())
    if total > max_bytes:
        raise ModelError(f"version {ref.version}: {total} bytes, expected at most {max_bytes}")
    if ref.sha256 and manifest.files[WEIGHTS].sha256 != ref.sha256:
        raise ModelError(
            f"{where}: {WEIGHTS} has sha256 {manifest.files[WEIGHTS].sha256}, expected {ref.sha256}"
        )
    for name, file in manifest.files.items():
        if sizes.get(name) != file.bytes:
            raise ModelError(
                f"{place}/{name}: {sizes.get(name, 'no')} bytes, expected {file.bytes} as in {MANIFEST}"
            )
    return manifest


def _download(fs: FileSystem, path: str, file: _File, to: Path) -> None:
    """Never more than was announced, however long the file turns out to be."""
    state, size = hashlib.sha256(), 0
    with _storage("read", path), fs.open(path, "rb") as source, to.open("xb") as target:
        while size <= file.bytes and (chunk := source.read(min(_CHUNK, file.bytes + 1 - size))):
            state.update(chunk)
            size += len(chunk)
            target.write(chunk)
    if size != file.bytes or state.hexdigest() != file.sha256:
        raise ModelError(
            f"{path}: is not the file that {MANIFEST} names: {size} bytes, sha256 {state.hexdigest()}"
        )


def _drafts(root: str) -> str:
    return f"{root.rstrip('/')}/drafts"


@contextmanager
def _storage(what: str, path: str) -> Iterator[None]:
    """Each file system has errors of its own."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise StorageError(f"{path}: cannot be {what}: {type(error).__name__}: {str(error)[:200]}") from error
