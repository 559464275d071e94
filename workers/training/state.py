"""A run's tensors and facts <-> one file that is there whole or not at all.

safetensors with the facts as JSON in its header: no pickle is written or read, and a file that a kill left half written
never gets the name that is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import structlog
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.workers.training.folder import RunFolder

log = structlog.get_logger(__name__)

_FORMAT = 1


def save_state(folder: RunFolder, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Replace the run's state."""
    text = json.dumps({"format": _FORMAT, **facts})
    data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"facts": text})
    folder.write(folder.state, data)


def load_state(folder: RunFolder) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The run's last state; None if there is none, or none that can be read: then the run begins anew."""
    try:
        with safe_open(folder.state, "pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        log.error("training_state_unreadable", file=str(folder.state), error=str(error)[:200])
        return None
    return (tensors, facts) if facts.get("format") == _FORMAT else None
