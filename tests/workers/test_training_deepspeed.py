"""DeepSpeed's ZeRO stages on one and two ranks -> the same steps as plain torch; run as a script, this is a rank.

python test_training_deepspeed.py STAGE RANK WORLD STORE OUT [STATE]
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.config import TrainConfig
from paceline.workers.training.batches import Batches
from paceline.workers.training.engines import make_engine
from paceline.workers.training.loop import Training, trainable
from paceline.workers.training.pool import Pool, Sample

VOCAB, TOP, STEPS = 97, 8, 6
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install paceline[train]"
)


def samples() -> dict[str, Sample]:
    """Random ones, the same in every process; lengths differ, so ranks have unlike work."""
    rng = np.random.default_rng(0)
    found = {}
    for index in range(23):
        prompt, rows = int(rng.integers(2, 9)), int(rng.integers(3, 20))
        ids = rng.integers(3, VOCAB, prompt + rows).astype(np.int32)
        top = np.stack([rng.permutation(VOCAB)[:TOP] for _ in range(rows)]).astype(np.int32)
        logs = np.log(rng.dirichlet(np.full(TOP + 1, 0.4), rows)[:, :TOP] + 1e-6).astype(np.float16)
        name = f"r{index:02}"
        found[name] = Sample(name, "t", float(index), "s", 1.0, prompt, ids, top, logs)
    return found


def run(stage: int, rank: int, world: int, store: Path, state: Path | None) -> tuple[Training, list[float]]:
    """Train a small random model."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = trainable(
        AutoModelForCausalLM.from_config(config, attn_implementation="paceline_training").eval()
    )
    settings = TrainConfig(
        batch_tokens=80, max_steps=STEPS, learning_rate=2e-2, loss="hybrid", zero_stage=stage
    )
    pool = Pool(samples())
    batches = Batches(pool, batch_tokens=80, fresh_share=1.0, max_tenant_share=1.0, seed=0)
    engine = make_engine(model, zero_stage=stage, rank=rank, world=world, store=store)
    training = Training(model, engine, pool, batches, settings, micro_tokens=40)
    if state is not None:
        tensors = load_file(state)
        training.restore(tensors, json.loads(state.with_suffix(".json").read_text()))
    losses = []
    while not training.is_done:
        training.step()
        losses.append(training.loss)
        if training.num_done == 3 and state is None:
            tensors, facts = training.state()
            if rank == 0:
                save_file({n: t.contiguous() for n, t in tensors.items()}, store.with_suffix(".safetensors"))
                store.with_suffix(".json").write_text(json.dumps(facts))
    return training, losses


def weights(training: Training) -> dict[str, torch.Tensor]:
    """Whole, whoever holds them."""
    return {n: t.clone() for n, t in training.state()[0].items()}


def launch(tmp_path: Path, stage: int, world: int, state: Path | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """All ranks as processes; rank 0's losses and weights."""
    store, out = tmp_path / f"store-{stage}-{world}-{state is None}", tmp_path / f"out-{stage}-{world}"
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(stage), str(rank), str(world), str(store), str(out), *([str(state)] if state else [])],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for rank in ranks:
        _, error = rank.communicate(timeout=280)
        assert rank.returncode == 0, error[-3000:]
    return json.loads(out.with_suffix(".json").read_text()), load_file(out.with_suffix(".safetensors"))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_deepspeed
@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_zero_takes_the_steps_of_plain_torch(stage: int, world: int, tmp_path: Path) -> None:
    """Step by step the same loss, at the end the same weights and moments, gathered from all ranks; no pickle is left."""
    training, losses = run(0, 0, 1, tmp_path / "plain", None)
    theirs, found = launch(tmp_path, stage, world)
    mine = weights(training)

    assert theirs == pytest.approx(losses, rel=1e-3)
    assert_same(found, mine)
    for of in (found, mine):  # far beyond what the comparison forgives
        assert min(float((of[name] - tensor).abs().max()) for name, tensor in training._first.items()) > 5e-3
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".bin", ".pkl")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_deepspeed
def test_a_state_moves_between_engines(tmp_path: Path) -> None:
    """Begun by plain torch and finished by ZeRO 2 on two ranks, and the other way round."""
    whole, losses = run(0, 0, 1, tmp_path / "plain", None)
    theirs, found = launch(tmp_path, 2, 2, tmp_path / "plain.safetensors")
    assert theirs == pytest.approx(losses[3:], rel=1e-3)
    assert_same(found, weights(whole))

    launch(tmp_path, 2, 2)
    back, rest = run(0, 0, 1, tmp_path / "back", tmp_path / "store-2-2-True.safetensors")
    assert rest == pytest.approx(losses[3:], rel=1e-3)
    assert_same(weights(back), weights(whole))


def test_asking_for_zero_without_deepspeed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop trains with stage 0."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"paceline\[train\]"):
        make_engine(model, zero_stage=1, store=tmp_path / "store")


if __name__ == "__main__":
    stage, rank, world = (int(text) for text in sys.argv[1:4])
    store, out = Path(sys.argv[4]), Path(sys.argv[5])
    trained, found = run(stage, rank, world, store, Path(sys.argv[6]) if len(sys.argv) > 6 else None)
    gathered = weights(trained)
    if rank == 0:
        save_file({n: t.contiguous() for n, t in gathered.items()}, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
