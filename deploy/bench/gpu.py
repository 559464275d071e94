"""This machine's GPU -> every figure that needs one: kernels against floors and libraries, whole steps of an 8B's shape.

`paceline bench --gpu`. A card, a line for each row, one line of JSON; where there is no CUDA device every figure reads
"not run", so that nobody takes silence for a result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.deploy.bench import gpu_steps, kernels
from paceline.deploy.bench.figures import Figure, Outcome, ceiling_verdict, verdict

WANTED: dict[str, tuple[str, float]] = {
    "gpu.verify_floor": ("at most", 1.5),
    "gpu.verify_vs_torch": ("at least", 5.0),
    "gpu.attn_bandwidth": ("at least", 0.75),
    "gpu.attn_vs_best": ("at least", 1.0),
    "gpu.attn_uneven_vs_best": ("at least", 1.5),
    "gpu.step_floor": ("at most", 1.25),
    "gpu.t64_t1": ("at most", 1.3),
}
"""What the figures are to reach."""


def run(
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    json_path: Path | None = None,
    out: Console | None = None,
) -> dict[str, Any]:
    """Measure, print, and return the object of the JSON line.

    Args:
        only: parts of names of kernels' rows, or "steps"; nothing takes all.
        quick: kernels' rows that have no figure are left out, and steps are few.
    """
    from paceline.deploy.bench.report import console

    out = out or console()
    rows = [row for source in kernels.SOURCES for row in source()]
    rows = [
        row
        for row in rows
        if (not only or any(name in row.name for name in only)) and (row.figure or not quick)
    ]
    has_steps = not only or "steps" in only
    figures: dict[str, Any] = {}
    found: dict[str, Any] = {"device": None, "figures": figures}
    if not torch.cuda.is_available():
        out.print("no CUDA device: nothing was run", markup=False)
        for row in rows:
            figures |= dict.fromkeys(row.names(), "not run")
        figures |= dict.fromkeys(gpu_steps.FIGURES if has_steps else (), "not run")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        found["device"] = kernels.card(device)
        out.print(found["device"], markup=False, soft_wrap=True)
        for row in rows:
            measured = kernels.measure(row, device)
            out.print(f"{measured.line()}  ({row.shape})", markup=False, soft_wrap=True, highlight=False)
            figures |= measured.entries()
        if has_steps:
            size = gpu_steps.Size(pairs=5) if quick else gpu_steps.Size()
            for name, figure in gpu_steps.StepBench(gpu_steps.shape_8b(), device, size).measure().items():
                out.print(f"{name:<28} {figure}", markup=False, highlight=False)
                figures |= figure.entries(name)
    found["outcomes"] = outcomes(figures)
    for name, outcome in found["outcomes"].items():
        way, limit = WANTED[name]
        out.print(f"{name:<28} wanted {way} {limit:g}: {outcome}", markup=False, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))
    return found


def outcomes(figures: dict[str, Any]) -> dict[str, Outcome | str]:
    """Of each wanted figure: pass, fail, not resolved, or not run."""
    found: dict[str, Outcome | str] = {}
    for name, (way, limit) in WANTED.items():
        value = figures.get(name, "not run")
        if isinstance(value, str):
            found[name] = "not run"
        else:
            figure = Figure(value, figures[f"{name}.lo"], figures[f"{name}.hi"])
            found[name] = verdict(figure, limit) if way == "at least" else ceiling_verdict(figure, limit)
    return found
