"""A configuration, as given and as it will run, and the models' shapes -> every derived value with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.config import ClusterConfig, EngineConfig, model_folder
from paceline.cluster.errors import ConfigError, ModelError
from paceline.cluster.handoff import head_ranges
from paceline.cluster.keys import needs_keys
from paceline.cluster.learning.consent import who_is_kept
from paceline.cluster.learning.storage import home

_KV_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Derived:
    """One value that nobody wrote down, and why it is what it is."""

    name: str
    value: str
    reason: str


def settings(config: ClusterConfig) -> dict[str, Any]:
    """Every field that differs from its default, as `section.field`."""
    changed = config.model_dump(exclude_defaults=True)
    return {
        f"{section}.{name}": value for section, fields in changed.items() for name, value in fields.items()
    }


def derived(given: ClusterConfig, config: ClusterConfig) -> list[Derived]:
    """In the order in which a request meets them.

    Raises:
        ModelError: a model's configuration does not say what shape its KV has.
    """
    return [
        *_surface(given, config),
        *_places(config),
        *_ways(config),
        *_pools(config),
        *_learning(config),
    ]


def check_ranks(config: ClusterConfig) -> None:
    """Refuse now what each rank would refuse later.

    Raises:
        ConfigError: the target's heads cannot be shared by so many ranks; names field, value and what was expected.
        ModelError: as `kv_bytes_per_token`.
    """
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        if section.replicas == 0 or section.tp == 1:
            continue
        heads, kv_heads, _ = _heads(config.model.target)
        if heads % section.tp:
            raise ConfigError(
                f"{role}.tp={section.tp}: expected a divisor of the target's num_attention_heads={heads}"
            )
        if kv_heads % section.tp and section.tp % kv_heads:
            raise ConfigError(
                f"{role}.tp={section.tp}: expected a divisor or a multiple of the target's "
                f"num_key_value_heads={kv_heads}"
            )


def check_learning(config: ClusterConfig) -> None:
    """Refuse now what each decode worker would refuse later.

    Raises:
        ConfigError: of `learning.storage`, `learning.registry` or `learning.capture.redact`.
    """
    if config.learning.enabled:
        from paceline.cluster.learning.capture import load_redactor  # pyarrow takes its time
        from paceline.cluster.learning.storage import learning_folder
        from paceline.cluster.registry.database import resolve_url

        learning_folder(config.learning)
        resolve_url(config.learning.registry, home())
        load_redactor(config.learning.capture.redact)


def _surface(given: ClusterConfig, config: ClusterConfig) -> Iterator[Derived]:
    for name, before, now in (
        ("gateway", given.gateway, config.gateway),
        ("control", given.control, config.control),
    ):
        if before.port != now.port:
            yield Derived(f"{name}.port", str(now.port), "free when it was started, since 0 was asked for")
    is_closed = needs_keys(config.gateway.auth, config.gateway.host)
    why = f"gateway.auth={config.gateway.auth} on {config.gateway.host}"
    yield Derived("API keys", "needed" if is_closed else "off", why)
    if config.learning.enabled:
        kept = who_is_kept(config.learning, needs_keys=is_closed)
        yield Derived("kept for training", kept, "learning.enabled=true; deleted sooner by tenant or request")
    context, reason = context_limit(config)
    yield Derived("context", f"{context} tokens", reason)


def _places(config: ClusterConfig) -> Iterator[Derived]:
    decode = config.decode
    total = decode.replicas * (decode.max_streams + decode.max_queue)
    if decode.max_replicas:
        most = decode.max_replicas * (decode.max_streams + decode.max_queue)
        yield Derived(
            "streams at most", str(most), f"decode.max_replicas={decode.max_replicas}, as scaling.* says"
        )
    yield Derived(
        "streams at once",
        str(total),
        f"{decode.replicas} decode x ({decode.max_streams} running + {decode.max_queue} waiting); more get a 429",
    )


def _ways(config: ClusterConfig) -> Iterator[Derived]:
    if config.prefill.replicas:
        reason = f"from kv.min_remote_tokens={config.kv.min_remote_tokens} on that are not cached; shorter ones at once"
        yield Derived("prompts", "prefill workers", reason)
    else:
        yield Derived("prompts", "decode workers", "prefill.replicas=0")
    speculation = config.speculation
    if not speculation.enabled:
        yield Derived("drafts", "off", "speculation.enabled=false")
    else:
        sources = [s for s in speculation.sources if s != "draft" or config.draft.replicas]
        reason = f"up to {speculation.depth} deep and {speculation.width} wide"
        if len(sources) < len(speculation.sources):
            reason += "; no draft model, since draft.replicas=0"
        yield Derived("drafts", " + ".join(sources) or "off", reason)
    how = {"node": "by which Ray knows each node"}.get(config.link.interface, "as configured")
    how = "each node's own in that network" if "/" in config.link.interface else how
    yield Derived("links bind to", config.link.interface, how)


def context_limit(config: ClusterConfig) -> tuple[int, str]:
    """Tokens of prompt and output together that one stream may have, and why.

    Raises:
        ModelError: as `kv_bytes_per_token`.
    """
    wanted = config.limits.max_context
    known = int(_model_config(config.model.target).get("max_position_embeddings", wanted))
    decode = config.decode
    room = num_blocks(decode, config.model.target, config.kv.block_size, decode.tp) * config.kv.block_size
    reason = (
        f"the smallest of limits.max_context={wanted}, the model's {known} and {room} in a decode worker's KV"
    )
    return min(wanted, known, room), reason


def num_blocks(engine: EngineConfig, model: str, block_size: int, tp: int = 1) -> int:
    """Blocks in the KV pool of one worker, of which each of `tp` ranks holds its heads."""
    return (engine.kv_memory_mb << 20) // (kv_bytes_per_token(model, tp) * block_size)


def _pools(config: ClusterConfig) -> Iterator[Derived]:
    kinds: tuple[tuple[str, EngineConfig, str, int], ...] = (
        ("prefill", config.prefill, config.model.target, config.prefill.tp),
        ("decode", config.decode, config.model.target, config.decode.tp),
        ("draft", config.draft, config.model.draft, 1),
    )
    for role, engine, model, tp in kinds:
        if engine.replicas == 0 or (role == "draft" and not config.speculation.enabled):
            continue
        block_bytes = kv_bytes_per_token(model, tp) * config.kv.block_size
        num = num_blocks(engine, model, config.kv.block_size, tp)
        tokens = num * config.kv.block_size
        yield Derived(
            f"{role} KV",
            f"{num} blocks",
            f"{engine.kv_memory_mb} MB{f' on each of {tp} ranks' if tp > 1 else ''} / {block_bytes} bytes a block: "
            f"{tokens} tokens",
        )


def _learning(config: ClusterConfig) -> Iterator[Derived]:
    """Whether anything is learned, where what is kept for that goes, and who trains."""
    learning = config.learning
    if not learning.enabled:
        yield Derived("learning", "off", "learning.enabled=false: nothing outlives a request")
        return
    trainer = "by hand only, since trainer.replicas=0"
    if config.has_trainer:
        by = "by itself" if learning.train_automatically else "when somebody asks"
        trainer = f"{by}, after {learning.train.min_requests} new requests or when acceptance falls"
    yield Derived("learning", "on", trainer)
    storage = str(home() / "learning") if learning.storage == "auto" else shown_url(learning.storage)
    consent = {
        "never": "none without a key",
        "asked": 'with `"store": true`',
        "default": 'without `"store": false`',
    }
    what = f"of requests without a key: {consent[learning.capture.local_consent]}"
    yield Derived(
        "captured", storage, f"{what}; {learning.capture.ttl_h:g} h, {learning.capture.max_mb} MB at most"
    )
    if config.has_trainer:
        reason = (
            f"at idle priority; paused at 90 % of {learning.guard.inter_token_p99_ms:g} ms between tokens"
        )
        yield Derived("trainer", f"{config.trainer.threads} threads", reason)


def shown_url(url: str) -> str:
    """Without what may be a password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url


def kv_bytes_per_token(model: str, tp: int = 1) -> int:
    """2 (K and V) x layers x KV heads of one of `tp` ranks x head size x 4 bytes.

    Raises:
        ModelError: config.json lacks one of these.
    """
    _, kv_heads, layer_bytes = _heads(model)
    return layer_bytes * max(held.num for held in head_ranges(kv_heads, tp))


def _heads(model: str) -> tuple[int, int, int]:
    """(attention heads, KV heads, bytes of one KV head of a token in all layers)."""
    shape = _model_config(model)
    try:
        heads = int(shape["num_attention_heads"])
        dim = int(shape.get("head_dim") or int(shape["hidden_size"]) // heads)
        kv_heads = int(shape.get("num_key_value_heads") or heads)
        return heads, kv_heads, 2 * int(shape["num_hidden_layers"]) * dim * _KV_ITEM_BYTES
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{model_folder(model)}/config.json: no usable shape: {error}") from error


def _model_config(model: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(Path(model_folder(model), "config.json").read_text())
    inner = tree.get("text_config")
    return inner if isinstance(inner, dict) else tree
