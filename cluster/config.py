"""YAML file and key=value settings -> one frozen tree that every process reads, plus what was derived and why."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.config import LearningConfig
from paceline.cluster.rates import Limits
from paceline.cluster.section import Amount, Cpus, Port, Resources, Seconds, Section, Threads
from paceline.cluster.types import SOURCE_NAMES

DRAFT_SOURCES = SOURCE_NAMES[1:]
"""Names of the drafters that `speculation.sources` may ask; tokens and figures carry the same names."""


class ModelConfig(Section):
    """Which weights are served."""

    name: str = "paceline-small"
    """The name clients send as `model`."""
    target: str = "bundled/target"
    """Folder with config.json, tokenizer.json and safetensors; a relative path is looked up among the bundled models."""
    draft: str = "bundled/draft"
    """Same for the draft model. It must use the target's tokenizer."""
    int8_weights: bool = False
    """LOSSY: the target's weights rounded to int8 with one scale for each output, on CPU. Steps read half the memory or
    less; what the model says changes, and is another version. Texts are then exact for the rounded model."""


class TlsConfig(Section):
    """TLS of a listener, where nothing before it (an Ingress, a load balancer) ends it."""

    cert: str = "none"
    """PEM file of the certificate and its chain, an absolute path on each node that listens. none: plain HTTP. A file
    that was renewed is taken within seconds, without a restart."""
    key: str = "none"
    """PEM file of its private key, without a passphrase."""

    @model_validator(mode="after")
    def _both_absolute(self) -> TlsConfig:
        if (self.cert == "none") != (self.key == "none"):
            name, other = ("key", "cert") if self.key == "none" else ("cert", "key")
            raise ValueError(f"tls.{name}=none: expected a PEM file beside tls.{other}")
        for name, path in (("cert", self.cert), ("key", self.key)):
            if path != "none" and not path.startswith("/"):
                raise ValueError(f"tls.{name}={path!r}: expected an absolute path, or none")
        return self

    @property
    def is_on(self) -> bool:
        """Whether the listener speaks TLS."""
        return self.cert != "none"


class GatewayConfig(Section):
    """The HTTP listener."""

    host: str = "127.0.0.1"
    """Interface to listen on. Loopback by default: keys are off there."""
    port: Port = 8000
    """0 picks a free port, printed at start."""
    recovery_limit_s: Seconds = 120.0
    """How long a stream waits with keep-alive comments for a worker to come back before it fails."""
    keepalive_s: Seconds = 2.0
    """Interval of those comments."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 12.0
    """A gateway or worker that is told to end takes nothing new and lets its streams run for this long. What is left
    then goes on in other workers; connections left at a gateway are closed."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Gateways, each on a node of its own, since all listen on the same port."""
    notice_s: Annotated[float, Field(ge=0, le=600)] = 6.0
    """One of several gateways that is told to end says so at /ready and goes on serving for this long: what balances
    between them must have seen it by then. A single one is replaced by one that listens already, and needs none."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 28)] = 4 << 20
    """Larger request bodies are refused with 413 before they are read."""
    client_timeout_s: Seconds = 30.0
    """How long a client may take to send its headers, then its body, and to make room for more of its answer."""
    auth: Literal["auto", "keys", "none"] = "auto"
    """keys: only requests with an API key are served (`paceline keys`). none: all are. auto: keys are off on loopback,
    for requests sent to a loopback name; `paceline serve` starts a gateway that others can reach only once there is a key."""
    keys_file: str = "auto"
    """Where API keys are kept, as hashes. auto: keys.json in PACELINE_HOME. What is in this file on Control's node is told
    to all gateways; one on a gateway's own node counts as well."""
    cors_origins: list[str] = Field(default=[])
    """Web pages that browsers let call this API, as `https://app.example.com`: scheme, host and port. None by default.
    Whoever uses such a page holds an API key."""
    tls: TlsConfig = TlsConfig()
    num_cpus: Cpus = 0.1
    """Ray's share for placement, not a limit."""
    resources: Resources = Field(default={})
    """Custom Ray resources it takes, to choose its node: {"node:__internal_head__": 0.001} is the head."""

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or f"{parts.scheme}://{parts.netloc}" != origin
                or not parts.netloc
            ):
                raise ValueError(
                    f"gateway.cors_origins: {origin!r}: expected an origin such as https://app.example.com, without a path"
                )
        return value


class RouterConfig(Section):
    """Directory and routing policy."""

    num_cpus: Cpus = 0.05
    """Ray's share for placement, not a limit."""
    resources: Resources = Field(default={})
    """As for the gateway."""


class EngineConfig(Section):
    """What prefill, decode and draft workers have in common."""

    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Processes of this role."""
    threads: Threads = 1
    """OpenMP threads. One for small models; waiting is passive, since spinning threads ruin their neighbours."""
    num_cpus: Cpus = 0.25
    """Ray's share for placement, not a limit."""
    kv_memory_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 96
    """Memory of the paged KV pool; the number of blocks follows from it."""
    max_streams: Annotated[int, Field(ge=1, le=4096)] = 64
    """Streams in one step."""
    token_budget: Annotated[int, Field(ge=16, le=65536)] = 256
    """Tokens in one step: decode nodes first, prefill chunks fill the rest."""
    num_gpus: Annotated[float, Field(ge=0, le=256)] = 0.0
    """Ray's share of GPUs for placement. Above 0 a worker of one rank computes there: bfloat16, steps from CUDA graphs."""
    resources: Resources = Field(default={})
    """Custom Ray resources that a replica takes: nodes that offer them get this role, for example {decode_node: 1}."""
    max_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """Replicas of this role on one node, at most; 1 spreads them so that a node's death costs one. 0: no limit."""

    @property
    def peak_replicas(self) -> int:
        """As many as there can be: whoever places them needs this much room."""
        return self.replicas


class ScaledConfig(EngineConfig):
    """What roles have in common of which there may be more when there is more to do."""

    max_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes of this role, at most: from `replicas` up to here there are as many as its load asks for (`scaling`). 0:
    always `replicas`."""

    @property
    def peak_replicas(self) -> int:
        return max(self.replicas, self.max_replicas)


class TargetConfig(ScaledConfig):
    """What workers that run the target have in common."""

    tp: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share one worker's target, all on one node (tensor parallelism): it must divide the target's attention
    heads, and divide its KV heads or be a multiple of them. `threads`, `num_cpus`, `num_gpus`, `resources` and
    `kv_memory_mb` are of each rank. Prefill and decode workers may differ. The text does not depend on it."""


class PrefillConfig(TargetConfig):
    """Workers that compute prompts."""


class DecodeConfig(TargetConfig):
    """Workers that generate. Without prefill workers they compute prompts too; without draft workers, no drafts."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes of this role; at least one."""
    max_queue: Annotated[int, Field(ge=0, le=65536)] = 64
    """Streams that may wait in one worker behind its `max_streams`. When all are full, new requests get a 429."""


class DraftConfig(ScaledConfig):
    """Workers that propose."""

    kv_memory_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 32
    """Memory of the draft's own KV pool; a draft has fewer and smaller layers than its target."""


class TrainerConfig(EngineConfig):
    """Workers that train drafts: only where `learning.enabled`. They yield to everybody else."""

    replicas: Annotated[int, Field(ge=0, le=1)] = 1
    """0 leaves capture, figures and roll-out by hand."""
    priority: Literal["idle", "normal"] = "idle"
    """idle: training gets what cores have left over, on a busy node nothing. normal: for a node of its own."""
    spare_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the cores that others on the node leave, the part that training at idle priority takes: more learns sooner and
    lengthens others' steps, for cores share caches and units. 1: all that the system gives it."""


class ControlConfig(Section):
    """The operator's listener: /metrics and /admin/api."""

    host: str = "127.0.0.1"
    """Interface to listen on. Loopback by default: these routes are for operators."""
    port: Port = 8001
    """0 picks a free port, printed at start."""
    tls: TlsConfig = TlsConfig()
    num_cpus: Cpus = 0.05
    """Ray's share for placement, not a limit."""
    resources: Resources = Field(default={})
    """As for the gateway."""


class ScalingConfig(Section):
    """How roles with `max_replicas` follow their load. No stream fails when a worker goes: it drains first."""

    busy: Annotated[float, Field(ge=0.05, le=1)] = 0.7
    """How busy a worker should be: for decode and draft workers streams, waiting ones included, as a share of
    `max_streams`; for prefill workers the share of time in which they compute."""
    up_after_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Workers come when those that are there were too busy for this long, besides half a minute of measuring."""
    down_after_s: Annotated[float, Field(ge=0, le=86400)] = 300.0
    """Workers go when fewer would have done for this long."""


class SpeculationConfig(Section):
    """How much is drafted. The text never depends on it."""

    enabled: bool = True
    """Whether anything is drafted at all."""
    depth: Annotated[int, Field(ge=1, le=16)] = 8
    """Draft tokens in a row, at most."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.3
    """A draft model stops where the chance that its whole chain is accepted falls below this: deep where the text is
    plain, shallow where it is not. 0 always goes to `depth`."""
    width: Annotated[int, Field(ge=1, le=8)] = 2
    """Alternatives at each node of the spine; they cost the draft nothing and the target one row each."""
    max_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 50.0
    """Upper bound on waiting for a remote draft in one step. The wait follows the measured round trip; a draft
    worker that misses is not waited for again until it answers in time."""

    sources: list[str] = Field(default=["suffix", "draft"])
    """Who proposes, in the order in which they are asked. suffix: copies from the stream's own past, prompt and answer,
    found while the draft worker works. draft: the draft workers."""
    control: Literal["fixed", "measured"] = "measured"
    """fixed: ask everybody and verify all that comes, in every step. measured: step times are measured at start, and each
    step asks whom and verifies what pays, nothing included."""

    @field_validator("sources", mode="before")
    @classmethod
    def _known_and_different(cls, value: object) -> object:
        names = value if isinstance(value, list) else []
        if not names or any(name not in DRAFT_SOURCES or names.count(name) > 1 for name in names):
            raise ValueError(
                f"speculation.sources={value!r}: expected a list of one or more of {', '.join(DRAFT_SOURCES)}, each once"
            )
        return value


class LinkConfig(Section):
    """Connections between workers: frames and KV."""

    interface: str = "127.0.0.1"
    """What all worker sockets bind to: frames, the link store and gloo's device. An address; `node`, the address by
    which Ray knows each node; or a network such as 10.1.0.0/16, in which each node has one. Never all interfaces."""
    backend: Literal["gloo", "shm", "cuda_ipc", "strict_fifo"] = "gloo"
    """What carries KV. shm and cuda_ipc: memory of the host, or of one GPU, that two workers of one node map; a worker of
    another node then computes its prompts itself. strict_fifo: gloo that also refuses what NCCL would not survive; for tests."""
    overlap: bool = True
    """Compute a prompt's next layers while the last ones are sent. Off to see what that is worth."""
    timeout_s: Annotated[float, Field(ge=0.2, le=60)] = 3.0
    """A KV message that takes longer poisons its link; the hand-off falls back to local prefill."""
    lease_s: Annotated[float, Field(ge=0.2, le=600)] = 4.0
    """A reservation without progress for this long is dropped and its blocks are freed."""
    first_reserve_s: Annotated[float, Field(ge=0.2, le=600)] = 20.0
    """How long a stream waits for its prefill worker to start before the decode worker computes the prompt."""
    ping_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """An idle connection sends a ping this often."""
    dead_s: Annotated[float, Field(ge=0.2, le=600)] = 4.0
    """A peer silent for this long is dead."""

    @field_validator("interface")
    @classmethod
    def _one_interface(cls, value: str) -> str:
        try:
            ok = value == "node" or not ipaddress.ip_network(value).network_address.is_unspecified
        except ValueError:
            ok = False
        if not ok:
            raise ValueError(
                f"link.interface={value!r}: expected an address, `node` or a network such as 10.1.0.0/16, "
                "and not all interfaces"
            )
        return value

    @model_validator(mode="after")
    def _pings_before_death(self) -> LinkConfig:
        if self.dead_s < 2 * self.ping_s:
            raise ValueError(
                f"link.dead_s={self.dead_s}: expected at least 2 * link.ping_s = {2 * self.ping_s}"
            )
        return self


class KVConfig(Section):
    """The paged pool and its transfer."""

    block_size: Annotated[int, Field(ge=8, le=256)] = 16
    """Tokens per block. 16 keeps waste small; larger blocks mean fewer table entries."""
    prefix_cache: bool = True
    """Keep KV of full blocks after their streams ended, until the room is needed: a prompt that begins like an earlier
    one of the same `cache_salt` is computed from where it differs. The text never depends on it."""
    min_remote_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 16
    """Prompts with fewer tokens of KV to compute than this are computed by the decode worker itself."""
    codec: Literal["none", "int8", "fp8"] = "none"
    """How KV is coded between prefill and decode workers. LOSSY unless none: int8 and fp8 send one byte an element and a
    scale for each token and head, a quarter of float32, and round; a text then depends on whether its prompt's KV was
    sent. For links slower than prefill only; every answer that it touched says so (`kv_source`: `link:int8`)."""


class LimitsConfig(Section):
    """What one request may ask for, and what one API key may use."""

    max_context: Annotated[int, Field(ge=32, le=1 << 20)] = 2048
    """Prompt and output together, in tokens; never more than the target's own limit."""
    default_max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """`max_tokens` of a chat request that gives none. Completions default to 16, as OpenAI's do."""
    requests_per_minute: Amount = 0
    """Of each API key that has no limit of its own (`paceline keys create --requests-per-minute`), over all gateways
    together; 0 is no limit. Beyond it requests get a 429 that says when to come again."""
    tokens_per_minute: Amount = 0
    """The same for tokens of prompts and answers. While it runs a request counts with all that it may generate."""
    concurrency: Amount = 0
    """The same for requests that run at once."""

    @property
    def of_a_key(self) -> Limits:
        """Of each API key that has none of its own."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class TelemetryConfig(Section):
    """What operators see besides /metrics: logs, traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Each process writes JSON lines to stderr, into its node's Ray logs. info: one line for each request in every process
    that it passes, and what changes; warning: only what goes wrong."""
    otlp_endpoint: str = "none"
    """Where gateways send a trace of each request, OTLP over HTTP: http://collector:4318. none: nowhere. Needs the
    packages of paceline[otel]. OTEL_EXPORTER_OTLP_HEADERS holds what the collector wants to see, a key for example."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of requests that are traced. A request with a `traceparent` is traced if its sender traces it."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        if value != "none" and not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", value):
            raise ValueError(
                f"telemetry.otlp_endpoint={value!r}: expected none, or a URL such as http://collector:4318"
            )
        return value


class ClusterConfig(Section):
    """The whole cluster, one tree for a laptop, a `ray up` cluster and a Helm release."""

    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    draft: DraftConfig = DraftConfig()
    trainer: TrainerConfig = TrainerConfig()
    control: ControlConfig = ControlConfig()
    scaling: ScalingConfig = ScalingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    link: LinkConfig = LinkConfig()
    kv: KVConfig = KVConfig()
    limits: LimitsConfig = LimitsConfig()
    learning: LearningConfig = LearningConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _ranks_or_a_limit_per_node(self) -> ClusterConfig:
        for role, section in (("prefill", self.prefill), ("decode", self.decode)):
            if section.tp > 1 and section.max_per_node:
                raise ValueError(
                    f"{role}.tp={section.tp}: expected 1 with {role}.max_per_node={section.max_per_node}, or "
                    f"{role}.max_per_node=0: Ray Serve keeps a worker's ranks on one node, or limits workers on a node"
                )
            if section.tp > 1 and 0 < section.num_gpus < 1:
                raise ValueError(
                    f"{role}.num_gpus={section.num_gpus}: expected 0, or at least 1 with {role}.tp={section.tp}: "
                    "ranks cannot share a GPU"
                )
        return self

    @model_validator(mode="after")
    def _from_few_to_many(self) -> ClusterConfig:
        for role, section in (("prefill", self.prefill), ("decode", self.decode), ("draft", self.draft)):
            if section.max_replicas and not 1 <= section.replicas <= section.max_replicas:
                raise ValueError(
                    f"{role}.max_replicas={section.max_replicas}: expected 0 (there are always {role}.replicas), or at "
                    f"least {role}.replicas={section.replicas}, which is then 1 or more"
                )
        return self

    @model_validator(mode="after")
    def _int8_on_whole_cpus(self) -> ClusterConfig:
        for role, section in (("prefill", self.prefill), ("decode", self.decode)):
            for name, value, wanted in (("tp", section.tp, 1), ("num_gpus", section.num_gpus, 0)):
                if self.model.int8_weights and value != wanted:
                    raise ValueError(f"{role}.{name}={value}: expected {wanted} with model.int8_weights=true")
        return self

    @property
    def has_trainer(self) -> bool:
        """Whether drafts are trained at all."""
        return self.learning.enabled and self.trainer.replicas > 0


class Secrets(Section):
    """Made at start, kept out of files that people share; travels only inside Ray's own arguments."""

    link: bytes = Field(repr=False)
    """Proves one worker to another and keys the KV digests."""
    admin: bytes = Field(default=b"", repr=False)
    """SHA-256 of the key that operators show Control; empty if there is none, and then nobody signs in."""

    @classmethod
    def create(cls) -> Secrets:
        """Fresh random secrets, or the link secret from PACELINE_LINK_SECRET (hex) on a shared cluster."""
        given = os.environ.get("PACELINE_LINK_SECRET", "")
        try:
            link = bytes.fromhex(given) if given else secrets.token_bytes(32)
        except ValueError as error:
            raise ConfigError("PACELINE_LINK_SECRET: expected hex digits, 64 of them") from error
        if len(link) != 32:
            raise ConfigError(f"PACELINE_LINK_SECRET: expected 64 hex digits, got {len(link) * 2}")
        return cls(link=link)


def load_config(source: str | Path | None, settings: Iterable[str] = ()) -> ClusterConfig:
    """Read a preset name or YAML file and apply `a.b=value` settings.

    Raises:
        ConfigError: names the field, the value and the legal range.
    """
    tree: dict[str, Any] = {}
    if source is not None:
        path = find_config(source)
        try:
            loaded = yaml.safe_load(path.read_text())
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected sections such as `decode:`, got {type(loaded).__name__}")
        tree = over_preset(loaded or {})
    for setting in settings:
        _apply(tree, setting)
    return check_config(tree)


def check_config(tree: Mapping[str, Any]) -> ClusterConfig:
    """A tree of plain values, which may say `preset: NAME` to stand on one -> the checked configuration.

    Raises:
        ConfigError: names the field, the value and the legal range.
    """
    try:
        return ClusterConfig.model_validate(over_preset(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def over_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree laid over the preset that it names, if it names one.

    Raises:
        ConfigError: there is no such preset.
    """
    rest = {name: value for name, value in tree.items() if name != "preset"}
    if "preset" not in tree:
        return rest
    name, known = tree["preset"], presets()
    if name not in known:
        raise ConfigError(f"preset={name!r}: expected one of {', '.join(known)}")
    return _laid_over(ClusterConfig, yaml.safe_load(known[name].read_text()), rest)


def _laid_over(
    section: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    """Sections are merged field by field; a field's value, be it a list or a mapping, is replaced."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        field = section.model_fields.get(name)
        kind = field.annotation if field is not None else None
        values = below[name], above[name]
        if (
            isinstance(kind, type)
            and issubclass(kind, BaseModel)
            and all(isinstance(v, dict) for v in values)
        ):
            merged[name] = _laid_over(kind, *values)
    return merged


def presets() -> dict[str, Path]:
    """Names and files of the bundled presets."""
    folder = Path(__file__).parent.parent / "deploy" / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(source: str | Path) -> Path:
    """A preset's name or a path -> the file."""
    known = presets()
    if str(source) in known:
        return known[str(source)]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"config {str(source)!r}: no such file, and no preset of that name (there are: {', '.join(known)})"
        )
    return path


def model_folder(name: str) -> Path:
    """A model folder: a path, or the name of a bundled one such as `bundled/target`.

    Raises:
        ConfigError: there is no such folder.
    """
    bundled = Path(__file__).parent.parent / "deploy" / "models"
    for folder in (Path(name), bundled / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(
        f"model folder {name!r}: no config.json there, nor among the bundled models in {bundled}"
    )


def _apply(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting!r}: expected section.field=value, for example decode.threads=2")
    node = tree
    *sections, leaf = key.strip().split(".")
    for name in sections:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {setting!r}: {name} is not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting!r}: value cannot be read: {error}") from error


def _explain(item: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{field}: unknown field; `paceline explain` lists all of them"
    if item["type"] == "value_error":  # a rule over several fields, which wrote its own message
        return str(item["msg"]).removeprefix("Value error, ")
    context = item.get("ctx") or {}
    bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    legal = " and ".join(f"{sign} {context[name]}" for name, sign in bounds.items() if name in context)
    return f"{field}={item['input']!r}: expected {legal or _plain(item['msg'])}{_range(field)}"


def _plain(message: str) -> str:
    """pydantic's words without their beginning: "Input should be a valid integer" -> "a valid integer"."""
    return message.removeprefix("Input should be ")


def _range(field: str) -> str:
    """The full range of a field, from its declaration: an error should name both ends."""
    section: type[BaseModel] = ClusterConfig
    *path, leaf = field.split(".")
    for name in path:
        info = section.model_fields.get(name)
        if (
            info is None
            or not isinstance(info.annotation, type)
            or not issubclass(info.annotation, BaseModel)
        ):
            return ""
        section = info.annotation
    info = section.model_fields.get(leaf)
    if info is None:
        return ""
    limits = {
        name: getattr(item, name)
        for item in info.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(item, name)
    }
    low = limits.get("ge", limits.get("gt"))
    high = limits.get("le", limits.get("lt"))
    return f" (legal: {low}..{high}, default {info.default})" if low is not None and high is not None else ""
