"""Plans of drafts -> versions in memory and in force, or refused with the reason while the old ones go on drafting."""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_folders import TARGET, publish_folder, published
from paceline.cluster.errors import StorageError
from paceline.cluster.learning.publish import MANIFEST, fetch
from paceline.cluster.learning.routing import place, version_for, versions_needed
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftOpen, DraftPlan, DraftRef, DraftTree, Sampling
from paceline.deploy.bench.learn.swap import perturbed
from paceline.workers.draft_engine import DraftEngine, probe_logits
from paceline.workers.draft_versions import DraftVersions, VersionLoader, probe_ids
from paceline.workers.model_runner import ModelRunner, load_runner

BLOCK = 4
PROMPT = tuple(range(3, 40))


def fresh(folder: Path) -> ModelRunner:
    return load_runner(folder, kv_memory_mb=1, block_size=BLOCK)[0]


def folder_of(ref: DraftRef) -> Path:
    return Path(ref.url.removeprefix("file://"))


@pytest.fixture(scope="module")
def base(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="module")
def others(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[DraftRef]:
    """Three published versions."""
    place = tmp_path_factory.mktemp("published")
    return [published(base, place, seed=seed) for seed in range(3)]


class Bench:
    """A draft engine with its versions; the thread aside is the test's own, and time stands still."""

    def __init__(self, base: Path, *, limit: int = 3, fetch: Any = fetch) -> None:
        runner = fresh(base)
        self.engine = DraftEngine(runner, token_budget=64)
        self.jobs: list[Callable[[], None]] = []
        self.num_changed = 0
        self.now = 0.0
        self.base = DraftRef(runner.version, "")
        self.versions = DraftVersions(
            self.engine,
            VersionLoader(base, runner, fetch),
            limit=limit,
            aside=self.jobs.append,
            post=lambda job: job(),
            worker_id="draft-0",
            changed=self._changed,
            clock=lambda: self.now,
        )

    def _changed(self) -> None:
        self.num_changed += 1

    def work(self) -> int:
        """Do what is to be done aside; how much that was."""
        num = 0
        while self.jobs:
            self.jobs.pop(0)()
            num += 1
        return num

    def plan(self, revision: int, *refs: DraftRef, live: DraftRef, **changes: Any) -> DraftPlan:
        plan = DraftPlan(revision, TARGET, (*refs, self.base), live.version)
        return msgspec.structs.replace(plan, **changes)

    def go(self, revision: int, *refs: DraftRef, live: DraftRef, **changes: Any) -> None:
        """Take a plan and do what it takes."""
        self.versions.receive(self.plan(revision, *refs, live=live, **changes))
        self.work()

    def tree(self, key: str = "r/0", prompt: tuple[int, ...] = PROMPT, **origin: str) -> DraftTree:
        """Of a stream opened just now, and closed again."""
        self.engine.open(key, DraftOpen(key, prompt, Sampling(1, 0.0), len(prompt), **origin))
        (tree,), _ = self.engine.propose([key], 4, 2)
        self.engine.close(key)
        return tree


@pytest.fixture
def bench(base: Path) -> Bench:
    return Bench(base)


def test_a_plan_takes_force_when_all_it_uses_is_there(
    bench: Bench, base: Path, others: list[DraftRef]
) -> None:
    """Until then the old version drafts; afterwards the engine's logits are, to the bit, those of a load of its own."""
    new = others[0]
    before = bench.engine.probe(probe_ids(bench.engine.runner.vocab_size))
    bench.versions.receive(bench.plan(5, new, live=new))

    assert bench.tree().version == bench.base.version and bench.versions.status().revision == -1
    assert bench.work() == 1
    other = fresh(folder_of(new))
    expected = probe_logits(other, list(range(8)), probe_ids(other.vocab_size))
    after = bench.engine.probe(probe_ids(other.vocab_size))
    assert torch.equal(after, expected) and not torch.equal(after, before)
    assert bench.tree().version == new.version
    status = bench.versions.status()
    assert (status.revision, status.target, status.live) == (5, TARGET, new.version)
    assert set(status.resident) == {new.version, bench.base.version} and not status.refused
    assert status.swap_ms > 0


def test_a_plan_said_again_changes_nothing_and_an_older_one_is_ignored(
    bench: Bench, others: list[DraftRef]
) -> None:
    new, old = others[:2]
    bench.go(5, new, live=new)
    changed = bench.num_changed
    for _ in range(3):
        bench.go(5, new, live=new)
    bench.go(4, old, live=old)

    assert bench.num_changed == changed and bench.versions.live == new.version
    bench.go(6, new, live=bench.base)  # back: it is still there, nothing is loaded
    assert bench.versions.live == bench.base.version and bench.num_changed == changed + 1


def test_new_streams_draft_as_a_fresh_engine_with_that_version(
    bench: Bench, base: Path, others: list[DraftRef]
) -> None:
    """Also where the prefix cache holds the same tokens of the version before: nobody finds its KV."""
    bench.tree()
    for turn, ref in enumerate((others[0], others[1], bench.base)):
        bench.go(turn, *others[:2], live=ref)
        alone = DraftEngine(fresh(folder_of(ref) if ref.url else base), token_budget=64)
        alone.open("r/0", DraftOpen("r/0", PROMPT, Sampling(1, 0.0), len(PROMPT)))

        assert bench.tree() == alone.propose(["r/0"], 4, 2)[0][0]
        assert bench.engine.pool.num_used == 0
        bench.engine.pool.check_integrity()


def test_without_the_version_in_the_salt_they_would_not(
    bench: Bench, others: list[DraftRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with one salt for all, the KV of the version before is found and drafts something else."""

    def salted_alike(self: DraftEngine, stream: Any, num: int) -> list[bytes]:
        self.pool.extend_hashes(stream.hashes, num, stream.tokens, "one")
        hashes: list[bytes] = stream.hashes[:num]
        return hashes

    bench.go(0, others[0], live=others[0])
    right = bench.tree()
    bench.go(1, others[0], live=bench.base)
    monkeypatch.setattr(DraftEngine, "_hashes", salted_alike)
    bench.tree()
    bench.go(2, others[0], live=others[0])

    assert bench.tree() != right


def test_a_running_stream_moves_with_its_next_proposal_and_shares_nothing(
    bench: Bench, others: list[DraftRef]
) -> None:
    """Its KV stays, and is good to draft with; what it computes is never found by another stream."""
    engine, tokens = bench.engine, list(PROMPT)
    engine.open("r/0", DraftOpen("r/0", PROMPT, Sampling(1, 0.0), len(PROMPT)))
    engine.propose(["r/0"], 4, 2)
    engine.draft_ahead()
    findable = engine.pool.num_findable
    bench.go(0, others[0], live=others[0])
    for turn in range(12):
        (tree,), dropped = engine.propose(["r/0"], 4, 2)
        assert tree.version == others[0].version and not dropped
        new = (int(tree.tokens[0]), 5 + turn)
        assert engine.advance("r/0", len(tokens), prefix_hash(tokens), new)
        tokens += new

    assert engine.pool.num_findable == findable
    engine.close("r/0")
    engine.open("s/0", DraftOpen("s/0", tuple(tokens), Sampling(1, 0.0), len(PROMPT)))
    assert engine.propose(["s/0"], 4, 2)[0][0].version == others[0].version
    assert engine.pool.num_findable > findable


def test_a_stream_that_moved_computes_nothing_again(bench: Bench, others: list[DraftRef]) -> None:
    """What keeps a switch short: the next proposal takes as many forwards as any other."""
    engine = bench.engine
    engine.open("r/0", DraftOpen("r/0", PROMPT, Sampling(1, 0.0), len(PROMPT)))
    engine.propose(["r/0"], 4, 2)
    bench.go(0, others[0], live=others[0])

    assert engine.num_missing("r/0") <= 0


def test_streams_of_several_versions_draft_side_by_side(bench: Bench, others: list[DraftRef]) -> None:
    """Each gets the tree that it would get alone."""
    a, b = others[:2]
    bench.go(0, a, b, live=a, routes=(("tenant:acme", b.version), ("domain:sql", bench.base.version)))
    origins = {"x/0": {}, "y/0": {"tenant": "acme", "domain": "sql"}, "z/0": {"domain": "sql"}}
    alone = {key: bench.tree(key, **origin) for key, origin in origins.items()}
    for key, origin in origins.items():
        bench.engine.open(key, DraftOpen(key, PROMPT, Sampling(1, 0.0), len(PROMPT), **origin))
    trees, dropped = bench.engine.propose(list(origins), 4, 2)

    assert not dropped and [tree.version for tree in trees] == [a.version, b.version, bench.base.version]
    for tree in trees:
        other = alone[tree.request_id]
        assert (tree.tokens, tree.parents, tree.version) == (other.tokens, other.parents, other.version)
        assert np.allclose(tree.scores, other.scores, rtol=1e-4)


# --- who drafts for whom --------------------------------------------------------------------------------


def test_the_canary_gets_its_share_and_every_attempt_at_a_request_the_same_draft() -> None:
    plan = DraftPlan(1, TARGET, (), "live", "canary", 0.2)
    names = [f"request-{i}" for i in range(4000)]
    chosen = [version_for(plan, f"{name}@5f.{i}/0", "", "") for i, name in enumerate(names)]

    assert 0.17 < chosen.count("canary") / len(names) < 0.23
    for name, version in zip(names, chosen, strict=True):
        again = (name, f"{name}/1", f"{name}@77.1/0", f"{name}@5f.9/12")
        assert {version_for(plan, other, "", "") for other in again} == {version}
    grown = msgspec.structs.replace(plan, canary_share=0.5)
    assert all(
        version_for(grown, n, "", "") == "canary" for n, v in zip(names, chosen, strict=True) if v == "canary"
    )
    assert all(0 <= place(name) < 1 for name in names)


def test_the_first_route_that_fits_comes_before_the_canary() -> None:
    routes = (("domain:sql", "d"), ("tenant:acme", "t"), ("domain:", "never"))
    plan = DraftPlan(1, TARGET, (), "live", "canary", 1.0, routes)

    assert version_for(plan, "r", "acme", "sql") == "d"
    assert version_for(plan, "r", "acme", "chat") == "t"
    assert version_for(plan, "r", "other", "chat") == "canary"
    assert versions_needed(plan) == ["live", "canary", "d", "t", "never"]
    tagged = msgspec.structs.replace(plan, canary_tag="tenant:acme")  # then nobody else's requests go there
    assert version_for(tagged, "r", "acme", "chat") == "canary"
    assert version_for(tagged, "r", "acme", "sql") == "d"
    assert version_for(tagged, "r", "other", "chat") == "live"


def test_a_stream_without_a_domain_takes_no_route_of_one() -> None:
    plan = DraftPlan(1, TARGET, (), "live", routes=(("domain:", "x"), ("tenant:", "y")))

    assert version_for(plan, "r", "", "") == "live"


# --- what is refused ------------------------------------------------------------------------------------


TENSOR = "model.layers.1.mlp.down_proj.weight"


def broken(base: Path, place: Path, how: str) -> DraftRef:
    """A published version with one thing wrong: damaged after it was published, or published like that."""
    ref = published(base, place / "first", seed=9, target="0123456789ab" if how == "target" else TARGET)
    folder = folder_of(ref)
    weights = folder / "model.safetensors"
    match how:
        case "corrupt":  # one bit
            data = bytearray(weights.read_bytes())
            data[-7] ^= 4
            weights.write_bytes(bytes(data))
            return ref
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
            return ref
        case "pickle":
            return disguised(folder, ref, b"\x80\x04" + pickle.dumps({"weights": [1.0] * 64}))
        case "pickle beside":
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1.0]))
            return ref
        case "half published":
            (folder / MANIFEST).unlink()
            return ref
        case "gone":
            shutil.rmtree(folder)
            return ref
        case "version":
            return msgspec.structs.replace(ref, version="aaaaaaaaaaaa")
        case "target":
            return ref
    made = place / "made"
    shutil.copytree(folder, made)
    (made / MANIFEST).unlink()
    tensors = load_file(made / "model.safetensors")
    wrong = tensors[TENSOR]
    match how:
        case "shape":
            tensors[TENSOR] = wrong[:, :-1].contiguous()
        case "missing":
            del tensors[TENSOR]
        case "too many":
            tensors["more"] = wrong.clone()
        case "dtype":
            tensors[TENSOR] = wrong.half()
        case "nan":
            wrong[3, 4] = float("nan")
        case "infinite":
            wrong[3, 4] = float("inf")
        case "other config":
            config = json.loads((made / "config.json").read_text())
            (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
        case "longer context":
            config = json.loads((made / "config.json").read_text())
            (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
        case "no card":
            (made / "card.json").unlink()
        case "tokenizer":
            (made / "tokenizer.json").write_text("{}")
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return publish_folder(made, place / "second")


def disguised(folder: Path, ref: DraftRef, data: bytes) -> DraftRef:
    """Other bytes for the weights, and everything that names them names these."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "model.safetensors").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"]["model.safetensors"] = {"bytes": len(data), "sha256": digest}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return msgspec.structs.replace(ref, sha256=digest)


REASONS = {
    "corrupt": "model.safetensors: is not the file that manifest.json names",
    "truncated": "bytes, expected .* as in manifest.json",
    "pickle": "found a pickle",
    "pickle beside": "pickles are never published or loaded",
    "half published": "no manifest.json there",
    "gone": "no manifest.json there",
    "version": "'aaaaaaaaaaaa', expected|expected aaaaaaaaaaaa|version 'aaaaaaaaaaaa'",
    "target": "target='0123456789ab', expected 'feedfacecafe'",
    "shape": "down_proj.weight: F32 .64, 95., expected F32 .64, 96.",
    "missing": "down_proj.weight: none, expected",
    "too many": "more: F32 .64, 96., expected none",
    "dtype": "down_proj.weight: F16",
    "nan": "NaN or infinite",
    "infinite": "NaN or infinite",
    "other config": "is not part of the model",
    "longer context": "vocabulary, context and KV",
    "no card": "card.json",
    "tokenizer": "tokenizer.json has sha256",
}


@pytest.fixture(scope="module")
def base_with_tokenizer(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with") / "tokenizer"
    shutil.copytree(base, folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    return folder


@pytest.mark.parametrize("how", list(REASONS))
def test_a_version_that_is_not_sound_is_refused_with_the_reason(
    how: str, base_with_tokenizer: Path, tmp_path: Path
) -> None:
    """What is in force stays in force, and a sound version is taken afterwards."""
    bench = Bench(base_with_tokenizer)
    bad = broken(base_with_tokenizer, tmp_path / "bad", how)
    before = bench.tree()
    bench.go(1, bad, live=bad)

    status = bench.versions.status()
    ((version, reason),) = status.refused
    assert version == bad.version and re.search(REASONS[how], reason), reason
    assert (status.revision, status.live, status.resident) == (-1, bench.base.version, (bench.base.version,))
    assert bench.tree() == before
    good = published(base_with_tokenizer, tmp_path / "good", seed=3)
    bench.go(2, good, live=good)
    assert bench.versions.status().live == good.version and not bench.versions.status().refused


def test_a_refused_canary_keeps_the_whole_plan_out_and_a_spare_one_does_not(
    bench: Bench, base: Path, others: list[DraftRef], tmp_path: Path
) -> None:
    bad = broken(base, tmp_path / "bad", "nan")
    bench.go(1, others[0], bad, live=others[0], canary=bad.version, canary_share=0.5)
    assert bench.versions.status().revision == -1
    bench.go(2, others[0], bad, live=others[0])

    status = bench.versions.status()
    assert (status.revision, status.live) == (2, others[0].version)
    assert [version for version, _ in status.refused] == [bad.version]


def test_weights_that_change_nothing_are_refused(bench: Bench, base: Path, tmp_path: Path) -> None:
    """Another hash, the same logits: a swap to it would be one in name only."""
    made = perturbed(base, tmp_path / "same", seed=1, noise=0.0, target=TARGET)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"note": "another"}))
    same = publish_folder(made, tmp_path / "published")
    bench.go(1, same, live=same)

    assert bench.versions.live == bench.base.version
    assert "it would change nothing" in dict(bench.versions.status().refused)[same.version]


def test_a_switch_that_does_nothing_is_noticed(
    bench: Bench, others: list[DraftRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the probe: the version is refused, and the status does not claim it."""
    monkeypatch.setattr(DraftEngine, "switch", lambda self, live, choose: 0)
    bench.go(1, others[0], live=others[0])

    status = bench.versions.status()
    assert status.live == bench.base.version == bench.tree().version
    assert "not those of a fresh load" in dict(status.refused)[others[0].version]


def test_a_switch_that_forgets_running_streams_is_noticed(
    bench: Bench, others: list[DraftRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.open("r/0", DraftOpen("r/0", PROMPT, Sampling(1, 0.0), len(PROMPT)))
    monkeypatch.setattr(DraftEngine, "_move", lambda self, stream, weights: None)
    bench.go(1, others[0], live=others[0])

    assert (
        "1 streams still drafted with other weights"
        in dict(bench.versions.status().refused)[others[0].version]
    )
    assert bench.engine.propose(["r/0"], 4, 2)[0][0].version == bench.base.version == bench.tree().version


def test_weights_that_changed_in_memory_are_noticed(bench: Bench, others: list[DraftRef]) -> None:
    """The probe is compared with what a fresh load gave, not with what the handle is called."""
    bench.go(1, others[0], live=bench.base)
    held = bench.versions._held[others[0].version].runner
    assert held._whole is not None
    held._whole._embedding *= 1.01
    bench.go(2, others[0], live=others[0])

    assert bench.versions.live == bench.base.version
    assert "not those of a fresh load" in dict(bench.versions.status().refused)[others[0].version]


def test_a_plan_for_another_target_is_not_followed(bench: Bench, others: list[DraftRef]) -> None:
    """Its versions may be as sound as they like; once that target is served, they are."""
    bench.versions.targets = frozenset({"0123456789ab"})
    bench.go(1, others[0], live=others[0])
    assert bench.versions.status().refused == (
        (others[0].version, f"trained for target {TARGET}; 0123456789ab is served"),
    )
    bench.versions.targets = frozenset({TARGET})
    bench.go(1, others[0], live=others[0])

    assert bench.versions.live == others[0].version and not bench.versions.status().refused


def test_versions_that_the_plan_does_not_place_are_refused(bench: Bench, others: list[DraftRef]) -> None:
    bench.go(1, live=others[0])
    assert bench.versions.status().refused == ((others[0].version, "the plan does not say where it lies"),)
    base = msgspec.structs.replace(bench.base, version="bbbbbbbbbbbb")
    bench.versions.receive(DraftPlan(2, TARGET, (base,), base.version))
    bench.work()

    assert "the draft of the configuration is" in dict(bench.versions.status().refused)[base.version]
    assert bench.versions.live == bench.base.version


def test_no_more_versions_are_held_than_configured(base: Path, others: list[DraftRef]) -> None:
    """Those in use come first, then the newest; a plan that uses more than fit is not followed."""
    bench = Bench(base, limit=2)
    bench.go(1, *others, live=others[2])
    assert set(bench.versions.status().resident) == {others[2].version, others[0].version}
    bench.go(2, *others, live=others[2], canary=others[0].version, routes=(("tenant:a", others[1].version),))

    status = bench.versions.status()
    assert status.revision == 1
    assert status.refused == ((others[1].version, "more versions in use than learning.rollout.resident=2"),)


def test_versions_no_longer_planned_are_released(bench: Bench, others: list[DraftRef]) -> None:
    bench.go(1, others[0], live=others[0])
    weights = weakref.ref(bench.engine.runner)
    bench.go(2, others[1], live=others[1])
    gc.collect()

    assert weights() is None
    assert set(bench.versions.status().resident) == {others[1].version, bench.base.version}


def test_storage_that_fails_is_asked_again(base: Path, others: list[DraftRef]) -> None:
    """Said as refused meanwhile; whatever a load raises, drafting goes on."""
    errors: list[Exception] = [StorageError("bucket: timed out"), MemoryError("no room")]
    asked: list[str] = []

    def failing(ref: DraftRef, folder: Path) -> Path:
        asked.append(ref.version)
        if errors:
            raise errors.pop(0)
        return fetch(ref, folder)

    bench = Bench(base, fetch=failing)
    for second, expected in (
        (0, "bucket: timed out"),
        (5, "bucket: timed out"),
        (11, "MemoryError: no room"),
    ):
        bench.now = float(second)
        bench.go(1, others[0], live=others[0])
        assert bench.versions.status().refused == ((others[0].version, expected),)
        assert bench.tree().version == bench.base.version
    bench.now = 30.0
    bench.go(1, others[0], live=others[0])

    assert bench.versions.live == others[0].version and len(asked) == 3
    assert not bench.versions.status().refused


def test_a_load_that_ends_after_its_plan_is_dropped(bench: Bench, others: list[DraftRef]) -> None:
    bench.versions.receive(bench.plan(1, others[0], live=others[0]))
    bench.versions.receive(bench.plan(2, others[1], live=others[1]))
    assert bench.work() == 2

    assert set(bench.versions.status().resident) == {others[1].version, bench.base.version}
