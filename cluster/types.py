"""request -> assignment -> KV hand-off -> drafts -> tokens: every struct that crosses a process.

All of it travels as typed msgpack frames (`paceline.cluster.wire`). Positions are absolute: position t of a
stream is index t of `prompt_ids + output`. An *epoch* counts the attempts at one request: whatever carries an
older epoch than the receiver knows is refused. An *incarnation* names one life of a worker process.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster.rates import Limits, Standing

Role = Literal["gateway", "router", "prefill", "decode", "draft", "trainer", "control"]
State = Literal["starting", "ready", "draining"]
FinishReason = Literal["stop", "length", "error"]

SOURCE_TARGET = 0
"""The token was computed by the target at a node whose children missed (or that had none)."""
SOURCE_DRAFT = 1
"""The token was proposed by a draft model and accepted."""
SOURCE_SUFFIX = 2
"""The token was copied from the stream's own past, or another's, and accepted."""
SOURCE_NAMES = ("target", "draft", "suffix")
"""Behind the target, also the names of the drafters: a configuration asks for them and figures are labelled by them."""


class Struct(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: immutable, tagged by class name, fields in order (small frames)."""


# --- a request ------------------------------------------------------------------------------------------


class Sampling(Struct, frozen=True):
    """How one stream's tokens are drawn. With the prompt and the target it fixes the text completely."""

    seed: int
    """Unsigned 64 bit; given by the client or drawn once at the gateway and kept for life."""
    temperature: float = 1.0
    """0 is plain argmax."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    choice: int = 0
    """Index among the `n` choices of a prompt; part of the noise key."""
    prompt_index: int = 0
    """Index among the prompts of one HTTP request; part of the noise key."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, multiplied where negative."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it stands in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to logits: (token id, bias), each id once."""
    min_tokens: int = 0
    """Output tokens before a stop token of the request can be drawn."""

    @property
    def is_adjusted(self) -> bool:
        """Logits change before temperature: by bias, penalties or minimum length."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )


class Request(Struct, frozen=True):
    """One stream to generate."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the stream; they are emitted, the gateway leaves them out of the text."""
    speculate: bool = True
    logprobs: int | None = None
    """Alternatives to report with each output token's log-probability; None asks for no log-probability at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    priority: int = 0
    """Lower runs earlier and is preempted later; equal ones go by arrival."""
    cache_salt: str = ""
    """Only streams with the same salt share KV of equal prefixes: others could tell from the time it takes."""
    tenant: str = ""
    """Whose request it is: the tenant of its API key, or "local" where no keys are asked for."""
    domain: str = ""
    """What it is about, if the client says so (`metadata.domain`): drafts and figures may be kept apart by it."""
    capture: bool = False
    """Operator, tenant and request agree that it may be kept for training. False: nothing of it outlives it."""

    @property
    def needs_prompt_logits(self) -> bool:
        """The prompt has to be computed where the stream runs: KV that comes from elsewhere brings no logits."""
        return self.prompt_logprobs is not None


# --- directory ------------------------------------------------------------------------------------------


class WorkerInfo(Struct, frozen=True):
    """What the directory knows of one worker process."""

    worker_id: str
    role: Role
    incarnation: int
    host: str
    port: int
    pid: int
    node: str
    state: State = "starting"
    version: str = ""
    """Content hash (12 hex digits) of the weights it serves."""
    kv_blocks_used: int = 0
    kv_blocks_free: int = 0
    num_streams: int = 0
    beside: tuple[str, ...] = ()
    """Of a draft worker: further weights that draft for some of its streams, a canary's and those of routes."""


class Register(Struct, frozen=True):
    """worker -> router, on connect and each second: here I am, this is my state."""

    worker: WorkerInfo


class Directory(Struct, frozen=True):
    """router -> everyone, on every change of membership or state and each second."""

    revision: int
    workers: tuple[WorkerInfo, ...]


class Route(Struct, frozen=True):
    """gateway -> router: who should serve this stream? `avoid` lists incarnations that just failed it."""

    request_id: str
    epoch: int
    num_tokens: int
    speculate: bool
    avoid: tuple[int, ...] = ()
    needs_prompt_logits: bool = False
    """A prefill worker would be of no use."""
    marks: bytes = b""
    """Of the leading blocks of its tokens (`paceline.cluster.prefixes`): who holds KV of them?"""
    is_new: bool = False
    """Nothing was done for it yet: it may be turned away."""
    digest: bytes = b""
    """What the request asks for; a quarantined one is turned away."""
    alone: bool = False
    """It was in flight at several crashes: give it a worker that serves nobody else meanwhile."""


class Assignment(Struct, frozen=True):
    """router -> gateway. `prefill` None means the decode worker computes the prompt itself.

    Without a decode worker, `reason` says why: one of the NO_* below.
    """

    request_id: str
    epoch: int
    decode: WorkerInfo | None
    prefill: WorkerInfo | None = None
    draft: WorkerInfo | None = None
    reason: str = ""
    retry_after_s: float = 0.0
    """With NO_ROOM: when there should be some."""


NO_WORKER = "no decode worker is ready"
NO_ROOM = "all decode workers' queues are full"
NO_PROBATION = "no decode worker has run dry yet"
QUARANTINED = "quarantined"


class Progress(Struct, frozen=True):
    """gateway -> router: whom an attempt keeps busy now, by incarnation; 0 is nobody, two zeros are its end.

    Sent when it starts, with the first tokens (the prefill worker is done), at the end, and for all to a new router.
    """

    request_id: str
    epoch: int
    decode: int = 0
    prefill: int = 0
    num_prefill: int = 0
    """Prompt tokens that the prefill worker was given."""


class Quarantine(Struct, frozen=True):
    """gateway -> router: what these requests ask for ended workers again and again; serve none of that for a while."""

    digests: tuple[bytes, ...]


# --- gateway <-> workers --------------------------------------------------------------------------------


class Generate(Struct, frozen=True):
    """gateway -> decode: run this stream. `resumed` are output tokens an earlier attempt already emitted."""

    request: Request
    epoch: int
    resumed: tuple[int, ...] = ()
    prefill: WorkerInfo | None = None
    draft: WorkerInfo | None = None
    local_reason: str = ""
    """Why there is no prefill worker: "short" prompt, "prefix_hit", "prompt_logits" wanted, "prefill_busy" with other
    prompts, "probation" of the stream, or "no_prefill_worker" that is ready."""


class Prefill(Struct, frozen=True):
    """gateway -> prefill: compute the KV of all but the last of these tokens and push it to `decode`."""

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    decode: WorkerInfo
    priority: int = 0
    """These two are the request's."""
    cache_salt: str = ""


class PrefillLost(Struct, frozen=True):
    """gateway -> decode: the prefill worker of this attempt is gone; compute the prompt yourself."""

    request_id: str
    epoch: int


class Cancel(Struct, frozen=True):
    """gateway -> decode, prefill: nobody waits for this attempt any more."""

    request_id: str
    epoch: int


class Logprobs(Struct, frozen=True):
    """Log-probabilities of n tokens in a row, by the model's own logits: before bias, penalties, temperature, filters.

    Flat little-endian arrays. own: float32 [n], of the tokens themselves. ranks: int32 [n], how many tokens are at least
    as probable, itself included. top_ids, top: int32 and float32 [n, num_top], the most probable tokens, best first.
    """

    num_top: int
    own: bytes
    ranks: bytes
    top_ids: bytes
    top: bytes


class Delta(Struct, frozen=True):
    """New tokens of one stream. `start` is the output position of the first; sources align with tokens."""

    request_id: str
    epoch: int
    start: int
    tokens: tuple[int, ...]
    sources: bytes
    num_drafted: int = 0
    finish: FinishReason | None = None
    kv_source: str = ""
    """How the prompt's KV came to be: "link", "link:<codec>", or "local:<reason>". Set in the first delta of an attempt."""
    kv_bytes: int = 0
    draft_version: str = ""
    error: str = ""
    logprobs: Logprobs | None = None
    """Of these tokens, if the request asked."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt without its first token, with the first output tokens of an attempt, if the request asked."""
    kv_skipped_tokens: int = 0
    """Tokens of the prompt whose KV was here already and was not sent. Set with `kv_source`, as is the next."""
    kv_exposed_s: float = 0.0
    """Seconds the stream waited for its KV after the prefill worker had said that all of it was announced."""
    queued_s: float = 0.0
    """Seconds it could have run, its KV here, before a step computed for it. Set with `kv_source`, too."""


class Deltas(Struct, frozen=True):
    """decode -> gateway: one frame per step for all streams of that gateway."""

    items: tuple[Delta, ...]


# --- prefill <-> decode: reserve, stream, commit --------------------------------------------------------


class KVLayout(Struct, frozen=True):
    """What both ends must agree on before a byte moves."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    model_version: str
    codec: str = "none"
    """How rows are coded on the link, `kv.codec`."""


class HeadRange(Struct, frozen=True):
    """KV heads [start, start + num) of all layers: what one rank holds."""

    start: int
    num: int


class KVPart(Struct, frozen=True):
    """What one sending rank has to give to one receiving rank, over a link of their own."""

    sender_rank: int
    receiver_rank: int
    head_start: int
    num_heads: int
    link_key: str = ""


class Reserve(Struct, frozen=True):
    """prefill -> decode, just before computing: make room for this many tokens."""

    request_id: str
    epoch: int
    sender: str
    sender_incarnation: int
    num_tokens: int
    layout: KVLayout
    heads: tuple[HeadRange, ...]
    """What each of the sender's ranks holds."""


class Grant(Struct, frozen=True):
    """decode -> prefill: room is made; connect the links named here that are not up yet."""

    request_id: str
    epoch: int
    start: int
    """The KV of the tokens before this one is here already: send what follows."""
    parts: tuple[KVPart, ...]
    """Who sends which heads to whom: together they are what the receiver's ranks hold, each head once."""
    store_host: str
    store_port: int


class Refuse(Struct, frozen=True):
    """decode -> prefill: not now (`retry_after_s` > 0) or not at all (0), and why."""

    request_id: str
    epoch: int
    reason: str
    retry_after_s: float = 0.0


class KVReady(Struct, frozen=True):
    """prefill -> decode: message `seq` of link `link_key` can be received: some layers and heads of one chunk."""

    request_id: str
    epoch: int
    link_key: str
    layer: int
    """The first of `num_layers`."""
    num_layers: int
    head_start: int
    num_heads: int
    start: int
    """The first of `num_tokens`."""
    num_tokens: int
    seq: int = 0
    digest: bytes = b""
    """16 bytes over all else here but `seq`, and over the bytes from the source pool; keyed for this pair."""
    digest_by: Literal["blake3", "gmac"] = "blake3"
    """Who took it: a GPU while it copies the rows, or a processor, which has instructions for the other."""


class Credit(Struct, frozen=True):
    """decode -> prefill: the receive of message `seq` is posted, send it; or (`accept` False) forget it."""

    link_key: str
    seq: int
    accept: bool = True


class Commit(Struct, frozen=True):
    """prefill -> decode: all messages of this hand-off were announced, on all its links."""

    request_id: str
    epoch: int
    sender_incarnation: int
    num_tokens: int
    num_messages: int


class CommitAck(Struct, frozen=True):
    """decode -> prefill: every digest held (`ok`), or the hand-off was dropped and why."""

    request_id: str
    epoch: int
    ok: bool
    reason: str = ""


class Abort(Struct, frozen=True):
    """Either way: this hand-off is over; `reason` is a short metric label."""

    request_id: str
    epoch: int
    reason: str


# --- decode <-> draft -----------------------------------------------------------------------------------


class DraftOpen(Struct, frozen=True):
    """Start, or restart after a mismatch, drafting for a stream: all its tokens and how they are drawn."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    num_prompt: int
    stop_ids: tuple[int, ...] = ()
    """The request's: its minimum length holds them back."""
    cache_salt: str = ""
    """The request's."""
    tenant: str = ""
    domain: str = ""
    """These two are the request's: they choose the draft."""


class DraftAdvance(Struct, frozen=True):
    """`token_ids` were committed behind position `base_len`; `prefix_hash` covers the tokens before them."""

    request_id: str
    base_len: int
    prefix_hash: int
    token_ids: tuple[int, ...]


class DraftAsk(Struct, frozen=True):
    """decode -> draft, one frame per step: what changed, and how much to propose behind the new ends."""

    step: int
    opens: tuple[DraftOpen, ...]
    advances: tuple[DraftAdvance, ...]
    closes: tuple[str, ...]
    depth: int
    width: int
    floor: float = 0.0
    """A chain ends where the chance that all of it is accepted falls below this."""


class DraftTree(Struct, frozen=True):
    """Proposed nodes behind position `base_len` of a stream, topological, spine first.

    `parents[i]` is -1 for a child of the pending token, else the index of a node before i.
    """

    request_id: str
    base_len: int
    prefix_hash: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    """Draft probability of the node given its parent."""
    version: str = ""
    """Of the weights that drafted it."""


class Drafts(Struct, frozen=True):
    """draft -> decode. `unknown` lists streams whose state was lost: they must be opened again."""

    step: int
    version: str
    """The one that is live: what new streams get."""
    trees: tuple[DraftTree, ...]
    unknown: tuple[str, ...] = ()


# --- learning -------------------------------------------------------------------------------------------
#
# Control says what should be, each second and on every change; workers say what is. Nothing is a command that could
# be lost: whoever starts anew, or was cut off, is brought to the state of the day by the next message.


class DraftRef(Struct, frozen=True):
    """A version of a draft model and where its weights lie."""

    version: str
    """Content hash (12 hex digits) of the weights."""
    url: str
    """fsspec URL or path of its folder: config.json and model.safetensors; "" is the draft of the configuration."""
    sha256: str = ""
    """Of model.safetensors, hex; "" is not checked."""


class DraftPlan(Struct, frozen=True):
    """control -> draft worker: the versions to hold, and who drafts for whom."""

    revision: int
    """Grows with every change, over restarts of control too."""
    target: str
    """Version of the target that all of them were trained for."""
    resident: tuple[DraftRef, ...]
    """To be in memory, newest first."""
    live: str
    """Version for all streams that nothing else is said of."""
    canary: str = ""
    canary_share: float = 0.0
    """Of the live version's streams, chosen by their request id, that get `canary`."""
    routes: tuple[tuple[str, str], ...] = ()
    """(tenant:NAME or domain:NAME, version), before `live`; the first that fits counts."""
    canary_tag: str = ""
    """If this is a route's tag, the canary gets its share of that route's streams instead of the live version's."""


class DraftStatus(Struct, frozen=True):
    """draft worker -> control, on every change and each second."""

    worker_id: str
    revision: int
    """Of the plan that is in force here."""
    target: str
    resident: tuple[str, ...]
    live: str
    canary: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    """(version, reason): what was asked for and will not be served."""
    swap_ms: float = 0.0
    """What the last change of the live version kept drafting waiting."""
    gap_ms: float = 0.0
    """The longest that an ask waited for its answer near that change, from when the version began to load."""


class ServedStream(Struct, frozen=True):
    """Figures of a stream that ended: counts and times, nothing of its text."""

    request_id: str
    tenant: str
    domain: str
    draft_version: str
    """The latest that drafted for it; "" if none did."""
    num_tokens: int
    num_steps: int
    """Steps that emitted tokens."""
    tested: tuple[int, ...] = ()
    """By depth, from 1: steps in which a draft model's node stood there and its parent was accepted."""
    accepted: tuple[int, ...] = ()
    """By depth: how many of those nodes' places were filled by what the draft model proposed."""
    seconds: float = 0.0
    """First to last token."""
    max_gap_s: float = 0.0
    """The longest time between two of its steps."""
    temperature: float = 1.0


class Served(Struct, frozen=True):
    """decode -> control, each second: streams that ended. `num_left_out` did not fit."""

    worker_id: str
    items: tuple[ServedStream, ...]
    num_left_out: int = 0


TrainLevel = Literal["normal", "throttle", "pause", "evict"]
TrainState = Literal["idle", "loading", "training", "scoring", "paused", "done", "failed"]


class TrainOrder(Struct, frozen=True):
    """One run: train a draft further on what was captured, or score versions on what was held out."""

    run_id: str
    kind: Literal["train", "score"]
    base: DraftRef
    """Trained further; when scoring, the champion."""
    candidate: DraftRef | None = None
    """When scoring."""
    tag: str = ""
    """tenant:NAME or domain:NAME: only what carries it counts; "" is everything."""
    settings: bytes = b"{}"
    """JSON: what of `learning.train` or `learning.gate` is different for this run."""


class TrainerPlan(Struct, frozen=True):
    """control -> trainer: what to work on, and how much it may take."""

    revision: int
    level: TrainLevel
    order: TrainOrder | None = None
    """None: stop, and forget what is not published."""


class TrainerStatus(Struct, frozen=True):
    """trainer -> control, on every change and each second."""

    worker_id: str
    revision: int
    run_id: str = ""
    state: TrainState = "idle"
    level: TrainLevel = "normal"
    step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    """Of wall time in this run, pauses left out."""
    cpu_s: float = 0.0
    result: DraftRef | None = None
    """The published version, when training is done."""
    report: bytes = b""
    """JSON: figures of the run; when scoring, the gate's report."""
    error: str = ""


# --- a worker's leader <-> its other ranks --------------------------------------------------------------
#
# Control of the KV links whose ends ranks have themselves. What they compute is said in frames of their own group, which
# knows no events: these come when they come. `KVReady` and `Credit` go this way too, to and from the other worker.


class RankHello(Struct, frozen=True):
    """rank -> leader: this connection is mine."""

    rank: int


class LinkOpen(Struct, frozen=True):
    """leader -> rank: have an end of this link. The key of the pair does not leave the node."""

    link_key: str
    pair_key: bytes
    store_host: str
    store_port: int
    is_sender: bool


class LinkExpect(Struct, frozen=True):
    """leader -> rank: receive this announced message."""

    message: KVReady


class LinkMark(Struct, frozen=True):
    """leader -> rank: say the same when all that was pushed into the link so far is announced."""

    link_key: str
    number: int


class LinkClose(Struct, frozen=True):
    """leader -> rank: drop the link."""

    link_key: str


class LinkForget(Struct, frozen=True):
    """leader -> rank: nobody wants what arrived."""

    link_key: str
    seq: int


class LinkSent(Struct, frozen=True):
    """rank -> leader: a message left, and its digest took so long."""

    link_key: str
    num_bytes: int
    digest_s: float


class LinkDown(Struct, frozen=True):
    """rank -> leader: the link is poisoned; `reason` is a short metric label."""

    link_key: str
    reason: str


class LinkArrived(Struct, frozen=True):
    """rank -> leader: the message is here, outside the pool. A frame says where it is to go."""

    message: KVReady


class LinkPlaced(Struct, frozen=True):
    """rank -> leader: the message is in the pool, and its digest held there, or did not."""

    link_key: str
    seq: int
    is_intact: bool
    num_bytes: int
    digest_s: float


# --- the door -------------------------------------------------------------------------------------------


class KeySet(Struct, frozen=True):
    """control -> gateway, when it connects and on every change: all API keys there are."""

    keys: bytes
    """JSON, the `keys` of a key file: hashes, and no key."""


class Admit(Struct, frozen=True):
    """gateway -> router: a request of a key that has limits wants in."""

    request_id: str
    """One that no other open request of this gateway has."""
    key: str
    """Its id."""
    limits: Limits
    tokens: int
    """What it may cost at most."""
    is_let_in: bool = False
    """It is running, since a router before this one, or this gateway while there was none, let it in: only count it."""


class Admitted(Struct, frozen=True):
    """router -> gateway: it is in, or why it is not."""

    request_id: str
    standing: Standing


class Settle(Struct, frozen=True):
    """gateway -> router: a request that was let in has ended, and what it did cost."""

    request_id: str
    key: str
    tokens: int


# --- everyone -> control --------------------------------------------------------------------------------


class Snapshot(Struct, frozen=True):
    """worker -> control, each second: its directory entry and its metrics in Prometheus text format."""

    worker: WorkerInfo
    metrics: bytes


# --- the connection itself ------------------------------------------------------------------------------


class Hello(Struct, frozen=True):
    """First frame, from the connecting side."""

    protocol: int
    worker_id: str
    incarnation: int
    nonce: bytes


class Welcome(Struct, frozen=True):
    """Answer: who listens, and proof that it knows the link secret."""

    worker_id: str
    incarnation: int
    nonce: bytes
    proof: bytes


class Proof(Struct, frozen=True):
    """Third frame: proof of the connecting side. Messages follow."""

    proof: bytes


class Ping(Struct, frozen=True):
    """Sent when nothing else was; silence past the limit means the peer is dead."""


Message = (
    Register | Directory | Route | Assignment | Progress | Quarantine | Generate | Prefill | PrefillLost | Cancel | Deltas
    | Reserve | Grant | Refuse | KVReady | Credit | Commit | CommitAck | Abort
    | RankHello | LinkOpen | LinkExpect | LinkMark | LinkClose | LinkForget | LinkSent | LinkDown | LinkArrived | LinkPlaced
    | DraftAsk | Drafts | DraftPlan | DraftStatus | Served | TrainerPlan | TrainerStatus | KeySet | Admit | Admitted | Settle | Snapshot | Hello | Welcome | Proof | Ping
)  # fmt: skip
