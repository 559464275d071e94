"""Captured requests and a draft -> steps whose gradients, order of data and results are what they should be."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from harness import VOCAB, tiny_model
from paceline.cluster.learning.config import TrainConfig
from paceline.workers.model_runner import load_model, load_model_config
from paceline.workers.training.batches import Batches
from paceline.workers.training.engines import PlainEngine
from paceline.workers.training.loop import Training, TrainingError, trainable
from paceline.workers.training.lora import LoraLinear, adapter_tensors, add_adapters, merge_adapters
from paceline.workers.training.microbatch import by_length, pack, take
from paceline.workers.training.pace import Evicted, Pace
from paceline.workers.training.pool import Pool, Sample, to_sample
from training_data import captured, load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft, both random; the target's logits are spread so that there is something to learn."""
    root = tmp_path_factory.mktemp("pair")
    tiny_model(root / "target", seed=1)
    model = load(root / "target")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20.0)
        model.get_output_embeddings().weight.mul_(15.0)
    model.save_pretrained(root / "target")
    tiny_model(root / "draft", seed=2, layers=2, hidden=32)
    with torch.no_grad():  # a target with something of low rank wrong in each layer, as adapters can mend
        for name, parameter in model.named_parameters():
            if "proj" in name:
                u, v = (torch.randn(n, 2) for n in parameter.shape)
                parameter += 0.6 * u @ v.T / parameter.shape[1] ** 0.5
    model.save_pretrained(root / "worn")
    return root


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """Of different lengths."""
    target = load(folder / "target")
    records = [
        *captured(target, 12, seed=1, num_tokens=20),
        *captured(target, 12, seed=2, num_tokens=9, num_prompt=13),
    ]
    found = [to_sample(r, "shard", vocab=VOCAB, max_context=1024) for r in records]
    assert None not in found
    return found  # type: ignore[return-value]


def draft(folder: Path, name: str = "draft") -> PreTrainedModel:
    return trainable(load_model(folder / name, load_model_config(folder / name)))


def start(
    model: PreTrainedModel, samples: list[Sample], *, micro: int = 64, pace: Pace | None = None, **how
) -> Training:  # type: ignore[no-untyped-def]
    """A run over samples, all fresh."""
    settings = TrainConfig(
        **{"batch_tokens": 128, "learning_rate": 3e-3, "loss": "kl", "max_steps": 30, **how}
    )
    pool = Pool({s.request_id: s for s in samples})
    batches = Batches(
        pool,
        batch_tokens=settings.batch_tokens,
        fresh_share=settings.fresh_share,
        max_tenant_share=settings.max_tenant_share,
        seed=settings.seed,
    )
    return Training(model, PlainEngine(model), pool, batches, settings, micro_tokens=micro, pace=pace)


def test_row_i_trains_the_prefix_before_output_token_i(folder: Path, samples: list[Sample]) -> None:
    """The target itself, trained on its own rows, has nothing to learn; one place further on, either way, it has."""
    target = draft(folder, "target")
    training = start(target, samples)
    training.step()
    off = []
    for by in (-1, 1):
        moved = [
            dataclasses.replace(
                s, num_prompt=s.num_prompt + by, top_ids=s.top_ids[: len(s.top_ids) - max(by, 0)],
                top_log_probs=s.top_log_probs[: len(s.top_ids) - max(by, 0)],
            )
            for s in samples
        ]  # fmt: skip
        wrong = start(draft(folder, "target"), moved)
        wrong.step()
        off.append(wrong.loss)

    assert training.loss < 1e-3  # half precision of what was captured
    assert training.acceptance > 0.99
    assert min(off) > 0.5, off


def test_packed_rows_give_the_logits_of_requests_alone(folder: Path, samples: list[Sample]) -> None:
    """Neither neighbours in the row nor padding inside attention are seen."""
    model = draft(folder)
    batch = pack(samples[::5], greedy_temperature=0.3, device=CPU)
    packed = model(
        input_ids=batch.input_ids_T[None], position_ids=batch.position_ids_T[None], use_cache=False,
        paceline_packed=batch.packed, logits_to_keep=batch.keep_N,
    ).logits[0]  # fmt: skip
    plain = load(folder / "draft")
    at = 0
    for sample in samples[::5]:
        ids = torch.from_numpy(sample.token_ids[None]).long()
        alone = plain(input_ids=ids).logits[0, sample.num_prompt - 1 : -1]
        torch.testing.assert_close(packed[at : at + sample.num_rows], alone, rtol=1e-4, atol=1e-5)
        at += sample.num_rows

    assert at == len(packed)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "mixtral", "qwen3"])
def test_other_families_train_on_packed_rows(family: str, model_folder) -> None:  # type: ignore[no-untyped-def]
    """Windows, capped scores and experts: the logits are those of transformers, and gradients reach all weights."""
    where = model_folder(family)
    model = trainable(load_model(where, load_model_config(where)))
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (17, 30)]
    from paceline.workers.training.attention import Packed

    rows = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(17), torch.arange(30)])[None],
        "use_cache": False,
        "paceline_packed": Packed.build((17, 30), CPU),
    }
    logits = model(**rows).logits[0]
    plain = load(where)
    alone = torch.cat([plain(input_ids=one[None]).logits[0] for one in ids])
    torch.autograd.backward(logits.square().sum())

    torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-3)
    assert all(p.grad is not None for p in model.parameters())


def test_micro_batches_change_nothing_but_rounding(folder: Path, samples: list[Sample]) -> None:
    """Gradients add up to that of the whole batch."""
    runs = [start(draft(folder), samples, micro=micro) for micro in (1, 64, 10_000)]
    for _ in range(3):
        for run in runs:
            run.step()

    for run in runs[1:]:
        assert run.loss == pytest.approx(runs[0].loss, rel=1e-4)
        for ours, theirs in zip(run.model.parameters(), runs[0].model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


SLOW_WITH_ADAPTERS = ("kl", "tv", "log_alpha", "adaspec")


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        *(("full", loss) for loss in ("kl", "tv", "log_alpha", "hybrid", "adaspec")),
        ("lora", "hybrid"),
        *(pytest.param("lora", loss, marks=pytest.mark.slow) for loss in SLOW_WITH_ADAPTERS),
    ],
)
def test_every_loss_and_method_raises_acceptance(
    folder: Path, samples: list[Sample], loss: str, method: str
) -> None:
    """On the requests that it learns from; what it is worth on others is the gate's affair."""
    model = draft(folder, "draft" if method == "full" else "worn")
    if method == "lora":
        add_adapters(model, 8, seed=0)
    training = start(model, samples, loss=loss, max_steps=40, learning_rate=1e-2)
    while not training.is_done:
        training.step()

    assert training.curve[-1][2] > training.curve[0][2] + 0.04, training.curve[::10]


def test_adaspec_begins_again_with_the_reference_beside_it(folder: Path, samples: list[Sample]) -> None:
    """Half of the steps train the reference; then the draft is what it was, and learns from 0.4 of the rows."""
    model = draft(folder)
    before = copy.deepcopy(model.state_dict())
    training = start(model, samples, loss="adaspec", max_steps=10)
    for _ in range(5):
        training.step()
    trained = copy.deepcopy(model.state_dict())
    training._begin_selection()

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert training._reference is not None
    assert all(torch.equal(v, trained[name]) for name, v in training._reference.state_dict().items())
    training.step()
    assert training.num_done == 6


def test_adapters_change_nothing_at_first_and_merge_to_the_same(folder: Path, samples: list[Sample]) -> None:
    """Frozen weights stay; merging gives the same logits without any adapter left."""
    model = draft(folder)
    plain = copy.deepcopy(model)
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    inputs = {**_alone(ids)}
    num = add_adapters(model, 4, seed=0)
    assert num == 14
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    training = start(model, samples, learning_rate=1e-2)
    for _ in range(5):
        training.step()
    trained = model(**inputs).logits
    tensors = adapter_tensors(model)
    merge_adapters(model)

    assert not any(isinstance(layer, LoraLinear) for layer in model.modules())
    torch.testing.assert_close(model(**inputs).logits, trained, rtol=1e-4, atol=1e-5)
    assert (trained - plain(**inputs).logits).abs().max() > 1e-3
    assert len(tensors) == 28
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)


def _alone(ids: torch.Tensor) -> dict[str, object]:
    from paceline.workers.training.attention import Packed

    return {"input_ids": ids, "use_cache": False, "paceline_packed": Packed.build((ids.shape[1],), CPU)}


@pytest.mark.parametrize("loss", ["hybrid", "adaspec"])
@pytest.mark.parametrize("at", [3, 7])
def test_goes_on_from_a_state_as_if_nothing_had_happened(
    folder: Path, samples: list[Sample], loss: str, at: int
) -> None:
    """The same requests in the same order and the same weights at the end, before and behind adaspec's switch."""
    whole = start(draft(folder), samples, loss=loss, max_steps=10)
    cut = start(draft(folder), samples, loss=loss, max_steps=10)
    order = [_recorded(whole), _recorded(cut)]
    while not whole.is_done:
        whole.step()
    for _ in range(at):
        cut.step()
    tensors, facts = cut.state()
    for _ in range(2):
        cut.step()  # what a kill loses
    resumed = start(draft(folder), samples, loss=loss, max_steps=10)
    order.append(_recorded(resumed))
    resumed.restore(tensors, facts)
    while not resumed.is_done:
        resumed.step()

    assert order[1][:at] + order[2] == order[0]
    assert resumed.loss == pytest.approx(whole.loss, rel=1e-5)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _recorded(training: Training) -> list[list[str]]:
    """Ids of the batches that it draws from now on."""
    drawn: list[list[str]] = []
    draw = training.batches.next

    def record() -> list[Sample]:
        batch = draw()
        drawn.append([s.request_id for s in batch])
        return batch

    training.batches.next = record  # type: ignore[method-assign]
    return drawn


def test_an_evicted_step_is_done_again(folder: Path, samples: list[Sample]) -> None:
    """Evicted between two micro-steps: the state is that of the last whole step, and the batch comes again."""
    pace = Pace()
    cut = start(draft(folder), samples, pace=pace, max_steps=4)
    order = _recorded(cut)
    cut.step()
    pace.set("evict")
    with pytest.raises(Evicted):
        cut.step()
    resumed = start(draft(folder), samples, max_steps=4)
    again = _recorded(resumed)
    resumed.restore(*cut.state())
    resumed.step()

    assert len(order) == 2
    assert again[0] == order[1]
    whole = start(draft(folder), samples, max_steps=4)
    whole.step()
    whole.step()
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_that_breaks_says_what_to_do(folder: Path, samples: list[Sample]) -> None:
    """NaN in the weights, or nothing left."""
    model = draft(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[5:].fill_(torch.nan)
    with pytest.raises(TrainingError, match="learning_rate"):
        start(model, samples).step()
    with pytest.raises(TrainingError, match="nothing is left"):
        start(draft(folder), []).step()


def test_micro_batches_hold_what_fits(samples: list[Sample]) -> None:
    """Every request once; none split; one at least."""
    left = by_length(samples)
    groups = []
    while left:
        groups.append(take(left, 60))

    assert sorted(s.request_id for g in groups for s in g) == sorted(s.request_id for s in samples)
    assert all(sum(len(s.token_ids) for s in g) <= 60 for g in groups)
    assert len(take(by_length(samples), 1)) == 1
