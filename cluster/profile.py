"""Measured times of a machine and a model pair <-> a JSON file, checked on the way in, that planners read.

Written by `paceline profile`. Times are in seconds, sizes in bytes, rates in units per second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from paceline.cluster.errors import ConfigError
from paceline.cluster.section import Section

FloatArray = npt.NDArray[np.float64]
Positive = Annotated[float, Field(gt=0, le=1e18)]
NotNegative = Annotated[float, Field(ge=0, le=1e18)]
Num = Annotated[int, Field(ge=1, le=1 << 40)]

FORMAT: Literal[1] = 1
"""Of the file; a reader refuses others."""


class Spread(Section):
    """Median and quartiles of repeated measurements."""

    median: Positive
    q1: Positive
    """A quarter of the measurements lie below."""
    q3: Positive
    """A quarter of the measurements lie above."""
    num: Num
    """How many measurements."""

    @model_validator(mode="after")
    def _in_order(self) -> Spread:
        if not self.q1 <= self.median <= self.q3:
            raise ValueError(f"median={self.median}: expected {self.q1}..{self.q3}, between q1 and q3")
        return self

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, q1=1.5, q3=2.5, num=3)
        """
        q1, median, q3 = (float(q) for q in np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75]))
        return cls(median=median, q1=q1, q3=q3, num=len(values))


class StepPoint(Section):
    """One forward of the target: `streams` trees of `nodes` nodes, each behind `context` tokens."""

    streams: Num
    nodes: Num
    context: Num
    seconds: Spread


class PrefillPoint(Section):
    """One prompt of `tokens` tokens, in chunks of `chunk`."""

    chunk: Num
    tokens: Num
    tokens_s: Spread


class DraftPoint(Section):
    """The draft model for `streams` streams at once."""

    streams: Num
    context: Num
    depth: Num
    width: Num
    step: Spread
    """Seconds of one forward with a row for each stream."""
    whole: Spread
    """Seconds of a whole draft of all streams: catching up, `depth` forwards, choosing children."""


class ThreadPoint(Section):
    """The target on another number of threads."""

    threads: Num
    decode: Spread
    """Seconds of a step of one stream with the tree that the configuration drafts."""
    prefill: Spread
    """Seconds of a prompt chunk."""


class LinkPoint(Section):
    """One message over a KV link, from its announcement to its arrival."""

    num_bytes: Num
    seconds: Spread


class CostModel(Section):
    """T = step + row * rows + stream * streams + key * keys + pair * rows * context, all coefficients in seconds.

    rows = streams * nodes; keys = streams * context. Fitted to relative errors, no coefficient below zero.
    """

    step: NotNegative
    row: NotNegative
    stream: NotNegative
    key: NotNegative
    pair: NotNegative
    residual: NotNegative
    """Median of |fitted - measured| / measured."""
    worst: NotNegative
    """The largest of these."""

    def seconds(self, streams: npt.ArrayLike, nodes: npt.ArrayLike, context: npt.ArrayLike) -> FloatArray:
        """Seconds of such steps; arguments broadcast."""
        weights = np.asarray([self.step, self.row, self.stream, self.key, self.pair])
        return np.asarray(_features(streams, nodes, context) @ weights)

    @classmethod
    def fit(cls, points: Sequence[StepPoint]) -> CostModel:
        """Least squares of relative errors. `points` must not be empty."""
        measured = np.asarray([point.seconds.median for point in points])
        columns = _features(
            [p.streams for p in points], [p.nodes for p in points], [p.context for p in points]
        )
        weights = _not_negative(columns / measured[:, None], np.ones(len(points)))
        errors = np.abs(columns @ weights / measured - 1.0)
        names = ("step", "row", "stream", "key", "pair")
        fitted = dict(zip(names, weights.tolist(), strict=True))
        return cls(**fitted, residual=float(np.median(errors)), worst=float(errors.max()))


class LinkModel(Section):
    """seconds = latency + bytes / bandwidth."""

    latency: NotNegative
    """Seconds of a message without content: credit and delivery."""
    bandwidth: Positive
    """Bytes per second."""
    residual: NotNegative
    """Median of |fitted - measured| / measured."""

    @classmethod
    def fit(cls, points: Sequence[LinkPoint]) -> LinkModel:
        """Least squares of relative errors. `points` must not be empty."""
        measured = np.asarray([point.seconds.median for point in points])
        sizes = np.asarray([point.num_bytes for point in points], np.float64)
        columns = np.stack([np.ones(len(points)), sizes], axis=-1)
        weights = _not_negative(columns / measured[:, None], np.ones(len(points)))
        # Too fast or too noisy for these sizes to tell: at least as fast as the fastest message.
        bandwidth = 1.0 / weights[1] if weights[1] > 0 else float((sizes / measured).max())
        errors = np.abs(columns @ weights / measured - 1.0)
        return cls(latency=float(weights[0]), bandwidth=bandwidth, residual=float(np.median(errors)))


class ModelCard(Section):
    """Which weights were measured, and how they ran."""

    folder: str
    version: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    """As workers register it: a hash of configuration and weights."""
    path: str
    """The forward that was measured: "whole step" and its arithmetic, "lean" or "transformers", and why not the former."""
    kv_bytes_per_token: Num
    threads: Num


class Machine(Section):
    """What the times belong to."""

    cpu: str
    cores: Num
    """That this process may use."""
    memory_bytes: Num
    versions: dict[str, str]
    """Of paceline, torch, transformers, Python and the system."""


class Profile(Section):
    """Everything `paceline profile` measured."""

    format: Literal[1] = 1
    created: str
    """UTC, ISO 8601."""
    is_quick: bool
    """Fewer points and repeats: good for a look, coarse for planning."""
    machine: Machine
    target: ModelCard
    draft: ModelCard
    steps: Annotated[tuple[StepPoint, ...], Field(min_length=1)]
    cost: CostModel
    prefill: Annotated[tuple[PrefillPoint, ...], Field(min_length=1)]
    drafts: tuple[DraftPoint, ...]
    threads: Annotated[tuple[ThreadPoint, ...], Field(min_length=1)]
    link: Annotated[tuple[LinkPoint, ...], Field(min_length=1)]
    link_cost: LinkModel

    def save(self, path: Path) -> None:
        """Write the file in one go.

        Raises:
            ConfigError: it cannot be written.
        """
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
            partial.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: the file is missing or no JSON; or names the field, its value and the legal range.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; `paceline profile` writes one") from error
        except ValueError as error:
            raise ConfigError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
            raise ConfigError(
                f"{path}: format={found!r}: expected {FORMAT}; `paceline profile` writes it anew"
            )
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(f"{path}: {_explain(item)}" for item in error.errors())) from None

    def best_threads(self, work: Literal["decode", "prefill"]) -> int:
        """The number of threads that was fastest."""
        return min(self.threads, key=lambda point: getattr(point, work).median).threads


def _explain(item: Any) -> str:
    """One line: field, value, and what is legal."""
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{field}: missing"
    if item["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if item["type"] == "value_error":  # a rule over several fields, which wrote its own message
        return f"{field}.{str(item['msg']).removeprefix('Value error, ')}"
    return f"{field}={item['input']!r}: expected {str(item['msg']).removeprefix('Input should be ')}"


def _features(streams: npt.ArrayLike, nodes: npt.ArrayLike, context: npt.ArrayLike) -> FloatArray:
    """float64 [..., 5]: 1, rows, streams, keys, rows * context."""
    b, n, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (streams, nodes, context)))
    return np.stack([np.ones_like(b), b * n, b, b * c, b * n * c], axis=-1)


def _not_negative(columns: FloatArray, wanted: FloatArray) -> FloatArray:
    """Least squares with weights >= 0: the best of all subsets of columns whose own solution is legal."""
    num = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    columns = columns / scale  # seconds a step and seconds a row * key are nine digits apart
    best, least = np.zeros(num), float("inf")
    for subset in range(1, 1 << num):
        taken = [i for i in range(num) if subset >> i & 1]
        found, *_ = np.linalg.lstsq(columns[:, taken], wanted, rcond=None)
        error = float(((columns[:, taken] @ found - wanted) ** 2).sum())
        if (found >= 0).all() and error < least - 1e-15:
            best, least = np.zeros(num), error
            best[taken] = found
    return np.asarray(best / scale)
