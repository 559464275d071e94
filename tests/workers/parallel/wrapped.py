"""A model folder, as a script in each of two processes -> the largest difference of transformers' way of cutting and ours.

torch's environment variables say who is who. Both ways use the same weights and tokens; theirs leaves distributed
tensors and wrapped forwards behind, which is what ours does without.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from paceline.workers.model_runner import load_model, load_model_config, text_config
from paceline.workers.parallel.group import Group
from paceline.workers.parallel.runner import shape_of
from paceline.workers.parallel.shards import cut_model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    # What `DistributedConfig` does to a model, which itself needs `accelerate`.
    wrapped = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    wrapped = apply_tensor_parallelism(wrapped, mesh, wrapped._expand_parallel_plan(dict(wrapped.tp_plan)))
    wrapped.eval()
    mine = load_model(folder, load_model_config(folder))
    mine.set_attn_implementation("eager")
    group = Group(rank, size)
    cut_model(mine, shape_of(text_config(mine.config)), group)
    store = dist.TCPStore("127.0.0.1", int(os.environ["GANG_PORT"]), is_master=rank == 0)
    group.join(store, "gang", 30.0)
    ids = torch.arange(40)[None] * 7 % 211
    with torch.no_grad():
        theirs = wrapped(input_ids=ids, use_cache=False).logits[0]
        parts = group.gather(_padded(mine(input_ids=ids, use_cache=False).logits[0]))
    if rank == 0:
        ours = torch.cat(parts, dim=1)[:, : theirs.shape[1]]
        print(float((ours - theirs).abs().max()), float(theirs.abs().max()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _padded(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(logits, (0, 108 - logits.shape[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
