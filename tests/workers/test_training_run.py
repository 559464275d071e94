"""Shards on storage and an order -> a published version, or a failure that says what to do."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from harness import VOCAB, tiny_model
from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.capture import ShardReader, delete, shards
from paceline.cluster.learning.publish import verify
from paceline.cluster.model_files import weights_version
from paceline.cluster.types import DraftRef, TrainOrder
from paceline.workers.training.batches import Batches, quotas
from paceline.workers.training.folder import RunFolder
from paceline.workers.training.pace import Pace
from paceline.workers.training.pool import Pool, Sample, Sieve, load_pool, to_sample
from paceline.workers.training.protocol import Progress
from paceline.workers.training.run import Run, settings_of
from paceline.workers.training.state import load_state
from training_data import TARGET, captured, load, write_shards

FILE = fsspec.filesystem("file")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair, the draft in bfloat16 with a tokenizer beside it."""
    root = tmp_path_factory.mktemp("pair")
    tiny_model(root / "target", seed=1)
    tiny_model(root / "draft", seed=2, layers=2, hidden=32)
    load(root / "draft").to(torch.bfloat16).save_pretrained(root / "draft")
    (root / "draft" / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return root


@pytest.fixture
def config(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """Small steps, storage in a folder of the test's own."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    settings = {
        "model.target": models / "target",
        "model.draft": models / "draft",
        "learning.enabled": True,
        "learning.storage": tmp_path / "storage",
        "learning.train.batch_tokens": 128,
        "learning.train.max_steps": 6,
        "learning.train.save_steps": 2,
        "learning.train.learning_rate": 0.003,
        "learning.train.loss": "kl",
    }
    return load_config(None, [f"{name}={value}" for name, value in settings.items()])


@pytest.fixture
def storage(models: Path, tmp_path: Path) -> Path:
    """40 requests of two tenants, some of them held out."""
    records = captured(load(models / "target"), 40, tenants=("a", "a", "a", "b"), holdout=0.2)
    write_shards(tmp_path / "storage", records)
    return tmp_path / "storage"


BASE = DraftRef("", "")


def run(config: ClusterConfig, tmp_path: Path, run_id: str = "run-1", *, pace: Pace | None = None, **order: object) -> tuple[Progress, list[Progress]]:  # fmt: skip
    """One run in this process; its end and all it said."""
    said: list[Progress] = []
    what = TrainOrder(run_id, order.pop("kind", "train"), order.pop("base", BASE), **order)  # type: ignore[arg-type]
    folder = RunFolder(tmp_path / "trainer", run_id)
    end = Run(config, what, folder, pace or Pace(), said.append).go()
    return end, said


def test_publishes_what_a_draft_worker_can_load(config: ClusterConfig, storage: Path, tmp_path: Path, models: Path) -> None:  # fmt: skip
    """Tensors, dtypes and tokenizer of the base; content decides the version; the card says what it came from."""
    end, said = run(config, tmp_path)
    report = json.loads(end.report)
    assert end.state == "done", end.error
    assert end.result is not None
    published = storage / "drafts" / end.result.version
    card = json.loads((published / "card.json").read_text())
    held_out = [r.request_id for r in ShardReader(FILE, str(storage)).requests(heldout=True)]

    assert [p.state for p in said[:2]] == ["loading", "training"]
    assert (end.step, end.num_steps) == (6, 6)
    assert end.num_tokens == report["tokens"] > 6 * 128
    verify(published, end.result)
    assert weights_version(published) == end.result.version != weights_version(models / "draft")
    assert (published / "tokenizer.json").read_bytes() == (models / "draft" / "tokenizer.json").read_bytes()
    with (
        safe_open(published / "model.safetensors", "pt") as new,
        safe_open(models / "draft" / "model.safetensors", "pt") as old,
    ):
        assert sorted(new.keys()) == sorted(old.keys())
        assert {str(new.get_tensor(n).dtype) for n in list(new.keys())} == {"torch.bfloat16"}
        assert any(not torch.equal(new.get_tensor(n), old.get_tensor(n)) for n in list(new.keys()))
    assert card["target"] == TARGET
    assert card["base"] == weights_version(models / "draft")
    assert card["run_id"] == "run-1"
    assert len(held_out) > 2
    assert 20 < card["lineage"]["num_requests"] <= 40 - len(held_out)
    assert sum(card["lineage"]["requests_by_tenant"].values()) == card["lineage"]["num_requests"]
    assert [Path(p).name for p in card["lineage"]["shards"]] == sorted(
        Path(p).name for p in shards(FILE, str(storage))
    )
    again, _ = run(config, tmp_path)  # a trainer that was replaced asks again
    assert again == end


def test_adapters_are_merged_and_kept_beside(config: ClusterConfig, storage: Path, tmp_path: Path) -> None:
    """A version with its adapter is one that can be fetched and verified like any other."""
    end, _ = run(config, tmp_path, settings=b'{"train": {"method": "lora", "lora_rank": 4}}')
    assert end.result is not None, end.error
    published = storage / "drafts" / end.result.version

    verify(published, end.result)
    with safe_open(published / "adapter.safetensors", "pt") as file:
        assert any("lora_A" in name for name in list(file.keys()))
    with safe_open(published / "model.safetensors", "pt") as file:
        assert not any("lora" in name for name in list(file.keys()))


def test_trains_a_published_version_further(config: ClusterConfig, storage: Path, tmp_path: Path) -> None:
    """The base of the next run is the result of the last."""
    first, _ = run(config, tmp_path)
    assert first.result is not None, first.error
    second, _ = run(config, tmp_path, "run-2", base=first.result)
    assert second.result is not None, second.error
    card = json.loads((storage / "drafts" / second.result.version / "card.json").read_text())

    assert card["base"] == first.result.version != second.result.version


class _Stops(Pace):
    """Does something at the n-th pause between micro-steps."""

    def __init__(self, at: int, act) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self._left, self._act = at, act

    def between(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act(self)
        super().between()


def test_goes_on_behind_an_eviction(config: ClusterConfig, storage: Path, tmp_path: Path) -> None:
    """Evicted in the middle, resumed by another process: the same version as in one go."""
    whole, _ = run(config, tmp_path, "whole")
    cut, _ = run(config, tmp_path, pace=_Stops(14, lambda pace: pace.set("evict")))
    assert cut.state == "paused"
    assert 0 < cut.step < 6, cut
    rest, said = run(config, tmp_path)

    assert rest.state == "done", rest.error
    assert next(p.step for p in said if p.state == "training") > cut.step - 1
    assert json.loads(rest.report)["curve"] == json.loads(whole.report)["curve"]
    assert rest.cpu_s > cut.cpu_s


def test_withdrawn_consent_ends_in_a_run_that_never_saw_it(
    config: ClusterConfig, storage: Path, tmp_path: Path
) -> None:
    """A tenant that is deleted in the middle: the run begins again without it; neither state nor card names it."""

    def withdraw(pace: Pace) -> None:
        delete(FILE, str(storage), tenant="b")
        pace.set("normal")

    end, said = run(config, tmp_path, pace=_Stops(14, withdraw))
    assert end.result is not None, end.error
    card = json.loads((storage / "drafts" / end.result.version / "card.json").read_text())
    steps = [p.step for p in said if p.state == "training"]

    assert list(card["lineage"]["requests_by_tenant"]) == ["a"]
    assert json.loads(end.report)["num_restarts"] == 1
    assert 0 in steps[2:] or any(b < a for a, b in itertools.pairwise(steps)), steps
    fresh, _ = run(config, tmp_path, "without")
    assert json.loads(fresh.report)["curve"] == json.loads(end.report)["curve"]


def test_a_state_on_disk_obeys_deletions_too(config: ClusterConfig, storage: Path, tmp_path: Path) -> None:
    """What was deleted while a run was evicted is in none of its weights when it goes on."""
    cut, _ = run(config, tmp_path, pace=_Stops(14, lambda pace: pace.set("evict")))
    assert cut.state == "paused"
    saved = load_state(RunFolder(tmp_path / "trainer", "run-1"))
    assert saved is not None
    name = next(iter(saved[1]["used"]))
    delete(FILE, str(storage), request_id=name)
    end, _ = run(config, tmp_path)

    assert end.state == "done", end.error
    assert json.loads(end.report)["num_restarts"] == 1


def test_a_deletion_of_what_was_not_used_yet_costs_nothing(
    config: ClusterConfig, storage: Path, tmp_path: Path
) -> None:
    """Only the batches that would have held it change; the state does not name it any more."""
    long = {"settings": b'{"train": {"max_steps": 20}}'}
    cut, _ = run(config, tmp_path, pace=_Stops(9, lambda pace: pace.set("evict")), **long)
    folder = RunFolder(tmp_path / "trainer", "run-1")
    saved = load_state(folder)
    assert saved is not None
    assert 1 <= cut.step <= 3
    left = {r.request_id for r in ShardReader(FILE, str(storage)).requests(heldout=False)} - set(
        saved[1]["used"]
    )
    name = min(left)
    delete(FILE, str(storage), request_id=name)
    cut, _ = run(config, tmp_path, pace=_Stops(12, lambda pace: pace.set("evict")), **long)
    assert cut.state == "paused"

    assert name.encode() not in folder.state.read_bytes()
    end, _ = run(config, tmp_path, **long)
    assert json.loads(end.report)["num_restarts"] == 0, end.error


def test_failures_say_what_to_do(
    config: ClusterConfig, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing captured, a tag that nobody has, a base that is not there, settings out of range, storage that is gone."""
    empty, _ = run(config, tmp_path, "empty")
    write_shards(tmp_path / "storage", captured(load(models / "target"), 8))
    tag, _ = run(config, tmp_path, "tag", tag="domain:poems")
    base, _ = run(config, tmp_path, "base", base=DraftRef("0" * 12, str(tmp_path / "nowhere")))
    settings, _ = run(config, tmp_path, "settings", settings=b'{"train": {"learning_rate": 7}}')
    target, _ = run(config, tmp_path, "target", settings=b'{"target": "ffffffffffff"}')

    for end, what in (
        (empty, "nothing to learn from"),
        (tag, "domain:poems"),
        (base, "nowhere"),
        (settings, "learning_rate"),
        (target, "of other"),
    ):
        assert (end.state, end.result) == ("failed", None)
        assert what in end.error, end.error

    def gone(*_: object, **__: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", gone)
    lost, _ = run(config, tmp_path, "lost")
    assert lost.state == "failed"
    assert "network is down" in lost.error


def test_malformed_records_are_counted_and_left_out(
    config: ClusterConfig, models: Path, tmp_path: Path
) -> None:
    """Ids beyond the vocabulary, NaN, a token twice: one tenant's nonsense ends nobody's run."""
    import dataclasses

    good = captured(load(models / "target"), 12)
    nan, twice, beyond = (record.rows.copy() for record in good[:3])
    nan["log_probs"][3, 2], beyond["ids_low"][0, 0] = np.nan, VOCAB
    twice["ids_low"][2, 1] = twice["ids_low"][2, 0]
    bad = [
        dataclasses.replace(good[0], request_id="nan", rows=nan),
        dataclasses.replace(good[1], request_id="twice", rows=twice),
        dataclasses.replace(good[2], request_id="beyond", rows=beyond),
    ]
    write_shards(tmp_path / "storage", [*good, *bad])
    end, _ = run(config, tmp_path)

    assert end.state == "done", end.error
    assert json.loads(end.report)["num_malformed"] == 3


# --- pool and batches -----------------------------------------------------------------------------------


def sample(name: str, tenant: str = "a", created: float = 0.0, rows: int = 10) -> Sample:
    """A sample whose numbers do not matter."""
    ids = np.zeros(rows + 2, np.int32)
    return Sample(name, tenant, created, "shard", 1.0, 2, ids, np.zeros((rows, 2), np.int32), np.zeros((rows, 2), np.float16))  # fmt: skip


def draw(
    pool: Pool, num: int, *, share: float = 0.5, batch: int = 200, fresh: float = 0.7
) -> list[list[Sample]]:
    batches = Batches(pool, batch_tokens=batch, fresh_share=fresh, max_tenant_share=share, seed=3)
    return [batches.next() for _ in range(num)]


def test_batches_mix_fresh_and_old_and_give_everybody_a_turn() -> None:
    """70 : 30, and no request a second time before all others had their first."""
    pool = Pool({f"f{i}": sample(f"f{i}") for i in range(40)}, {f"o{i}": sample(f"o{i}") for i in range(30)})
    drawn = draw(pool, 5)
    counts = Counter(s.request_id for batch in drawn for s in batch)

    assert all(Counter(s.request_id[0] for s in batch) == {"f": 14, "o": 6} for batch in drawn)
    assert (
        sorted(counts.values()) == [1] * 30 + [1] * 10 + [2] * 30
    )  # 70 fresh turns of 40, 30 old ones of 30
    assert all(len({s.request_id for s in batch}) == len(batch) for batch in drawn)


def test_one_tenant_cannot_take_a_batch_over() -> None:
    """With 95 % of the traffic it has half of each batch, as long as others can fill the rest."""
    flood = {f"x{i}": sample(f"x{i}", "x") for i in range(950)}
    others = {f"{t}{i}": sample(f"{t}{i}", t) for t in "ab" for i in range(25)}
    for batch in draw(Pool({**flood, **others}), 20):
        rows = Counter(s.tenant for s in batch)
        assert rows["x"] <= 10, rows
        assert sum(rows.values()) == 20
    without = draw(Pool({**flood, **others}), 20, share=1.0)  # negative control
    assert sum(s.tenant == "x" for batch in without for s in batch) > 360


def test_quotas_never_ask_for_more_than_there_is() -> None:
    """And fill a batch whenever there is enough of anything."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        available = {str(i): int(rng.integers(1, 1000)) for i in range(rng.integers(1, 6))}
        wanted, share = int(rng.integers(1, 1500)), float(rng.uniform(0.05, 1))
        given = quotas(available, wanted, share)
        assert all(given[t] <= available[t] for t in given)
        assert abs(sum(given.values()) - min(wanted, sum(available.values()))) <= len(available)


def test_the_reservoir_is_uniform_and_the_same_in_any_order() -> None:
    """Old ones by hash, fresh ones by time; a second drawing of the same ids gives the same."""
    everything = [sample(f"r{i}", created=float(i)) for i in range(400)]
    size = everything[0].num_bytes

    def drawn(order: list[Sample], seed: int = 0, only: frozenset[str] | None = None) -> Pool:
        sieve = Sieve(fresh_since=199.5, fresh_bytes=50 * size, old_bytes=30 * size, seed=seed, only=only)
        for one in order:
            sieve.add(one)
        return sieve.pool()

    pool, reverse = drawn(everything), drawn(everything[::-1])
    assert list(pool.fresh) == [f"r{i}" for i in range(399, 349, -1)]
    assert list(pool.old) == list(reverse.old)
    assert pool.num_left_out == 320
    hits = Counter(name for seed in range(200) for name in drawn(everything, seed).old)
    assert len(hits) == 200  # everybody is drawn: 30 expected for each
    assert max(hits.values()) < 60
    assert min(hits.values()) > 8
    same = drawn(everything, only=frozenset([*pool.fresh, *pool.old]))
    assert (list(same.fresh), list(same.old)) == (list(pool.fresh), list(pool.old))


def test_a_pool_holds_nothing_held_out_or_of_another_target(models: Path, tmp_path: Path) -> None:
    """Whatever else is there."""
    records = captured(load(models / "target"), 30, holdout=0.3)
    write_shards(tmp_path, records)
    reader = ShardReader(FILE, str(tmp_path))
    sieve = Sieve(fresh_since=0.0, fresh_bytes=1 << 20, old_bytes=1 << 20, seed=0)
    pool = load_pool(
        reader,
        shards(FILE, str(tmp_path)),
        sieve,
        tag="",
        target_version=TARGET,
        vocab=VOCAB,
        max_context=1024,
    )

    assert set(pool.fresh) == {r.request_id for r in records if not r.is_heldout}
    assert 0 < len(pool) < 30
    short = to_sample(records[0], "s", vocab=VOCAB, max_context=10)
    assert short is not None
    assert (short.num_rows, len(short.token_ids)) == (4, 10)
    assert to_sample(records[0], "s", vocab=VOCAB, max_context=6) is None


def test_settings_of_an_order_are_checked(config: ClusterConfig) -> None:
    """What the order says wins; nonsense is named."""
    order = TrainOrder(
        "r", "train", BASE, settings=b'{"train": {"max_steps": 9, "loss": "tv"}, "since": 5.0, "streams": 2}'
    )
    settings, common = settings_of(config.learning.train, order)

    assert (settings.max_steps, settings.loss, settings.batch_tokens, common.since) == (9, "tv", 128, 5.0)
    for text in (b"{", b'{"train": {"loss": "magic"}}', b'{"train": {"batch_tokens": 1}}'):
        with pytest.raises(ConfigError):
            settings_of(config.learning.train, TrainOrder("r", "train", BASE, settings=text))
