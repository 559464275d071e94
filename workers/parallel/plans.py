"""A model's family and the number of ranks -> how each of its modules and parameters is cut.

The table is transformers' own (`model.tp_plan`), which says by module what is cut by columns and what by rows. Its
styles are turned into cuts of whole heads, because that is what a KV pool and a hand-off can be divided by; where it
leaves attention whole, a table of ours replaces it. `DistributedConfig`, transformers' way of applying the same table,
is not used: it cuts evenly, through a KV head where there are fewer of them than ranks and through a fused q, k, v
wherever that falls; it needs another package (`accelerate`), and the process's default group, which has sockets on other
interfaces than ours; and of what it wraps around each module nothing would be left (`paceline.workers.parallel.shards`).
The test of both on the same weights says that they agree.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from transformers import PreTrainedModel

from paceline.cluster.errors import ModelError


class Cut(Enum):
    """What a rank keeps of a module or parameter."""

    HEADS = "query heads: outputs of a linear"
    KV_HEADS = "KV heads: outputs of a linear; ranks that share a head have it each"
    FUSED_QKV = "query heads, then KV heads twice: outputs of one linear"
    SINKS = "query heads: a parameter [H]"
    COLUMNS = "outputs of a linear"
    PACKED = "the same part of both halves of the outputs: gate and up in one, a linear or [experts, 2 * I, hidden]"
    ROWS = "inputs; what comes out is summed over the ranks: a linear, or [experts, hidden, I], which is summed below"
    PAIRS = "every second output is a gate, the one behind it its up: [experts, hidden, 2 * I] or [experts, 2 * I]"
    INNER = "the middle one of [experts, I, hidden]"
    ONCE = "added once, so by rank 0 alone: a bias behind what is summed"
    SUMMED = "a module whose output is summed over the ranks"
    VOCABULARY = "outputs of the head: token ids"


_STYLES = {
    "colwise": Cut.COLUMNS,
    "rowwise": Cut.ROWS,
    "packed_colwise": Cut.PACKED,
    "moe_tp_experts": Cut.SUMMED,
}
"""transformers' styles, where a cut of ours follows from the style alone."""
_WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise")
"""Styles of what every rank has. Embeddings too: a look-up in a whole table is cheaper than a sum over the ranks."""
_BY_NAME = {"q_proj": Cut.HEADS, "k_proj": Cut.KV_HEADS, "v_proj": Cut.KV_HEADS}

_LLAMA_ATTENTION = {
    "layers.*.self_attn.q_proj": Cut.HEADS,
    "layers.*.self_attn.k_proj": Cut.KV_HEADS,
    "layers.*.self_attn.v_proj": Cut.KV_HEADS,
    "layers.*.self_attn.o_proj": Cut.ROWS,
}
OWN: dict[str, dict[str, Cut]] = {
    # transformers gathers q, k and v on every rank, and gate and up as well, because each two are one linear.
    "phi3": {
        "layers.*.self_attn.qkv_proj": Cut.FUSED_QKV,
        "layers.*.self_attn.o_proj": Cut.ROWS,
        "layers.*.mlp.gate_up_proj": Cut.PACKED,
        "layers.*.mlp.down_proj": Cut.ROWS,
    },
    # transformers has a plan for its experts only, and that one gives whole experts to ranks.
    "gpt_oss": {
        **_LLAMA_ATTENTION,
        "layers.*.self_attn.sinks": Cut.SINKS,
        "layers.*.mlp.experts.gate_up_proj": Cut.PAIRS,
        "layers.*.mlp.experts.gate_up_proj_bias": Cut.PAIRS,
        "layers.*.mlp.experts.down_proj": Cut.INNER,
        "layers.*.mlp.experts.down_proj_bias": Cut.ONCE,
        "layers.*.mlp.experts": Cut.SUMMED,
    },
}
"""Families whose table we replace, by model_type; names are those below the decoder, as in transformers' tables."""


def plan_for(model: PreTrainedModel) -> dict[str, Cut]:
    """Names of modules and parameters, layers by number -> their cuts. What is not named is whole on every rank.

    Raises:
        ModelError: the family's attention cannot be cut by heads, or its table has a style that is not known here.
    """
    wanted = _table(model)
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found = {name: wanted[key] for name in names if (key := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in wanted}
    cuts = set(found.values())
    if not (cuts & {Cut.HEADS, Cut.FUSED_QKV} and Cut.VOCABULARY in cuts):
        raise ModelError(
            f"model_type={_family(model)!r}: expected a family whose attention can be cut by heads; it runs with tp=1"
        )
    return found


def _table(model: PreTrainedModel) -> dict[str, Cut]:
    """By wildcard name. The head is cut by token ids whatever a table says: nobody needs whole rows of logits."""
    own = OWN.get(_family(model))
    if own is not None:
        prefix = f"{model.base_model_prefix}."
        table = {f"{prefix}{name}": cut for name, cut in own.items()}
    else:
        table = {}
        for name, style in model.tp_plan.items():
            cut = _cut(name, style)
            if cut is not None:
                table[name] = cut
    return {**table, "lm_head": Cut.VOCABULARY}


def _cut(name: str, style: str) -> Cut | None:
    last = name.rpartition(".")[2]
    if style in _WHOLE or last == "lm_head":
        return None
    if style == "colwise" and last in _BY_NAME:
        return _BY_NAME[last]
    if style not in _STYLES:
        raise ModelError(
            f"tensor-parallel plan of transformers: {name} is {style!r}, expected one of "
            f"{', '.join([*_STYLES, *_WHOLE])}; the family runs with tp=1"
        )
    return _STYLES[style]


def _family(model: Any) -> str:
    return str(model.config.get_text_config().model_type)
