"""Rows of the kernels' card, this machine's GPU -> measured times of each: floor, ours, plain torch, other libraries.

`paceline bench --gpu` prints them. Each row runs on inputs of its own, several copies of them where one would stay in the L2 cache, captured in a CUDA graph
as in a serving step; what plain torch cannot have captured runs as it is. Ours, torch, other libraries that are
installed and a copy of memory alternate, 30 rounds; a ratio is taken in each round (`figures`). The floor is the bytes
that have to move over the bandwidth that the copy reaches, or the time of arithmetic that cannot be left out, whichever
is longer; docs/kernels.md says which.

A row is a line of `SOURCES`; other files add theirs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from paceline.deploy.bench import kernels_attention, kernels_verify
from paceline.deploy.bench.figures import Count, Figure, alternate, ratio, unit_seconds
from paceline.deploy.bench.kernel_rows import Row

SOURCES: Sequence[Callable[[], list[Row]]] = (kernels_verify.rows, kernels_attention.rows)

_ROUNDS = 30
_BLOCK_S = 0.02
_COPY_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one row: seconds a call, how many times the floor, how many times faster than torch."""

    row: Row
    ours: Figure
    floor: Figure
    vs_torch: Figure | None
    floor_seconds: float
    vs_best: Figure | None = None
    best: str = ""
    """The fastest of torch and the other libraries."""

    def line(self) -> str:
        torch_part = "" if self.vs_torch is None else f"  torch / ours {self.vs_torch}"
        if self.vs_best is not None and self.best != "torch":
            torch_part += f"  {self.best} / ours {self.vs_best}"
        return (
            f"{self.row.name:<28} floor {self.floor_seconds * 1e6:9.1f} us  ours {self.ours.value * 1e6:9.1f} us"
            f"  ours / floor {self.floor}{torch_part}"
        )

    def entries(self) -> dict[str, float]:
        """Under the figure's name of the row, if it has one, else under the row's own."""
        name = self.row.figure or f"kernel.{self.row.name.replace(' ', '_')}"
        found = self.floor.entries(f"{name}_floor") | {f"{name}_us": self.ours.value * 1e6}
        if self.vs_torch is not None:
            found |= self.vs_torch.entries(f"{name}_vs_torch")
        if self.row.has_bandwidth:
            share = Figure(1 / self.floor.value, 1 / self.floor.hi, 1 / self.floor.lo)
            found |= share.entries(f"{name}_bandwidth")
            if self.vs_best is not None:
                found |= self.vs_best.entries(f"{name}_vs_best")
        return found


def measure(row: Row, device: torch.device) -> Measured:
    """Run one row."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(1, min(16, -(-4 * cache // max(1, row.bytes_moved))))
    made = [row.make(device, copy) for copy in range(copies)]
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    blocks = {
        "ours": _block([runs.ours for runs in made], is_captured=True),
        "copy": _block([lambda: target.copy_(source)], is_captured=True),
    }
    peers = {name: [runs.others[name] for runs in made] for name in made[0].others}
    plain = [runs.plain for runs in made if runs.plain is not None]
    if plain:
        peers = {"torch": plain, **peers}
    blocks |= {name: _block(calls, is_captured=made[0].can_capture) for name, calls in peers.items()}
    counts = alternate(blocks, _ROUNDS)
    best = min(peers, key=lambda name: unit_seconds(counts[name]).value, default="")
    seconds_a_byte = unit_seconds(counts["copy"]).value / (2 * _COPY_BYTES)
    floor_seconds = max(row.bytes_moved * seconds_a_byte, row.least_seconds(device))
    ours = unit_seconds(counts["ours"])
    return Measured(
        row,
        ours,
        ours.times(1 / floor_seconds),
        ratio(counts["ours"], counts["torch"]) if plain else None,
        floor_seconds,
        ratio(counts["ours"], counts[best]) if best else None,
        best,
    )


def _block(calls: Sequence[Callable[[], object]], *, is_captured: bool) -> Callable[[int], Count]:
    """All calls one after the other, often enough for a block to last; timed on the device."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(2):  # compile
            for call in calls:
                call()
    torch.cuda.synchronize()
    run: Callable[[], object]
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        run = graph.replay
    else:

        def run() -> None:
            for call in calls:
                call()

    repeats = max(1, int(_BLOCK_S / max(_seconds(run, 2) / 2, 1e-6)))

    def block(_: int) -> Count:
        return Count(repeats * len(calls), _seconds(run, repeats))

    return block


def _seconds(run: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def card(device: torch.device) -> str:
    """What was measured on, with versions."""
    p = torch.cuda.get_device_properties(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return (
        f"{p.name}, {p.multi_processor_count} multiprocessors, L2 {p.L2_cache_size >> 20} MiB, "
        f"{p.total_memory >> 30} GiB; torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}"
    )
