/**
 * cluster/admin -> dashboard: every JSON endpoint under /admin/api/ and every event of its stream.
 *
 * This file is the contract. `paceline.cluster.admin` implements it, `paceline drafts ...` uses the same endpoints.
 *
 * Units. Points in time are Unix seconds (float). `_s` seconds, `_ms` milliseconds, `_bytes` bytes. Shares, savings and
 * acceptance are 0..1 (a saving may be negative), never per cent. `null` means "not known yet", never 0. Field names
 * are the wire's names. Lists are newest first unless said otherwise. An empty tag "" means "everything".
 *
 * Pages. GET /admin/ answers cluster/admin/static/index.html, GET /admin/assets/* its files (their names carry a hash: they may be
 * cached for ever), GET /admin/favicon.svg; /admin redirects to /admin/. The page keeps its place in the fragment, so no other path
 * is needed. Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';
 * base-uri 'none'; form-action 'none'; frame-ancestors 'none'.
 *
 * Sign in. `POST session` with an admin key sets an HttpOnly, SameSite=Strict cookie and returns a CSRF token. Each
 * request that changes something carries it as `X-CSRF-Token`. Programs send `Authorization: Bearer KEY` and need no
 * cookie and no token. Without either: 401.
 *
 * Errors. Any status >= 400 has the body `ApiError`. 401: sign in. 403: wrong CSRF token. 404: no such thing. 409: it cannot be
 * done in the state things are in (message says why). 422: a field is wrong (`field` names it). 429: wait (Retry-After). 503: the registry or
 * storage does not answer; figures and workers still do.
 */

export interface ApiError {
  error: {
    /** For programs; does not change with the words. */
    code: string;
    /** One plain sentence, shown to the operator as it is. */
    message: string;
    /** What to do about it; "" if nothing. */
    action: string;
    /** Of the request, if one is to blame. */
    field: string | null;
  };
}

/** One page of a long list. */
export interface Page<T> {
  items: T[];
  /** Of all that match the filter. */
  total: number;
  /** Pass as `cursor` for what follows; null at the end. */
  next: string | null;
}

// --- session ----------------------------------------------------------------------------------------------

/** POST /admin/api/session: body SignIn -> Session, 401 if the key is wrong, 429 after too many wrong ones.
 *  GET  /admin/api/session -> Session, 401 if not signed in.
 *  DELETE /admin/api/session (CSRF) -> 204. */
export interface SignIn {
  key: string;
}

export interface Session {
  /** Name of the key, as the audit shows it. */
  who: string;
  csrf: string;
  expires: number;
  model: string;
  /** Of Paceline. */
  build: string;
}

// --- overview ---------------------------------------------------------------------------------------------

/** GET /admin/api/overview -> Overview. Also the event `overview`, each second. */
export interface Overview {
  at: number;
  model: string;
  learning: Learning;
  /** The version for everything that no route or canary takes; null without a draft model. */
  live: LiveVersion | null;
  canary: Canary | null;
  /** Other versions by tenant or domain, before `live`. */
  routes: Route[];
  acceptance: Recent;
  tokens_per_step: Recent;
  tokens_per_s: Recent;
  /** 99th percentiles of the last 10 s. */
  ttft_p99_ms: number | null;
  inter_token_p99_ms: number | null;
  num_streams: number;
  speculation: Speculation;
  guard: GuardNow;
  alarms: Alarm[];
  /** What makes the next run begin; empty when learning is off. */
  triggers: Trigger[];
  /** The run that is on, if any. */
  run: RunSummary | null;
}

export interface Recent {
  /** Over the last 60 s. */
  now: number | null;
  /** Over the last hour. */
  hour: number | null;
}

/** off: the configuration says so. paused: by an operator. waiting: for a trigger. blocked: it would not pay, or there is no
 *  trainer. preparing: a candidate is being loaded. watching: a promoted one against its predecessor. frozen: after a rollback. */
export type LearningState =
  | "off"
  | "paused"
  | "waiting"
  | "blocked"
  | "training"
  | "scoring"
  | "preparing"
  | "canary"
  | "watching"
  | "frozen";

export interface Learning {
  state: LearningState;
  /** One sentence: why it is in this state. */
  reason: string;
  /** When the state ends by itself (frozen), else null. */
  until: number | null;
  /** By an operator; may hold beside another state. */
  is_paused: boolean;
}

export interface LiveVersion {
  version: string;
  since: number;
  /** "loop" or the name of an admin key. */
  by: string;
  /** Pinned: the loop may train and gate, but replaces nothing. */
  pinned: boolean;
}

export interface Canary {
  version: string;
  tag: string;
  share: number;
  since: number;
  num_requests: number;
  /** Of these, requests in which a draft was tried: only they show anything of it. */
  num_drafted: number;
  /** Of those, before a decision, unless it is clear earlier. */
  min_requests: number;
  /** Next to nothing was drafted so far, for example because drafting is off: the comparison says nothing yet. */
  is_weak: boolean;
  /** Candidate against champion so far, with the interval that the sequential test has now: > 0 is better. */
  saving: Interval | null;
}

export interface Route {
  /** "tenant:NAME" or "domain:NAME" */
  tag: string;
  version: string;
}

export interface Speculation {
  on: boolean;
  reason: string;
  /** Decode workers in which it is on, of all. */
  num_on: number;
  num_workers: number;
}

export type GuardLevel = "normal" | "throttle" | "pause" | "evict";

export interface GuardNow {
  level: GuardLevel;
  reason: string;
  since: number;
}

export interface Alarm {
  /** Stable while the alarm lasts. */
  id: string;
  severity: "warning" | "critical";
  message: string;
  /** What the operator can do; "" if nothing. */
  hint: string;
  since: number;
}

export interface Trigger {
  name: string;
  /** "New requests captured" */
  label: string;
  fires_at: number;
  now: number;
  /** "requests", "tokens", "points of acceptance", "s": printed after the numbers. */
  unit: string;
  /** above: fires when now >= fires_at. below: when now <= fires_at. */
  direction: "above" | "below";
  /** "" = everything */
  tag: string;
}

export interface Interval {
  mean: number;
  /** 95 %. */
  lo: number;
  hi: number;
}

// --- workers ----------------------------------------------------------------------------------------------

/** GET /admin/api/workers -> Worker[], in order of role and id. Also the event `workers`, each second. */
export interface Worker {
  id: string;
  role: "gateway" | "router" | "prefill" | "decode" | "draft" | "trainer" | "control";
  state: string;
  /** Of the target it serves; "" where there is none. */
  version: string;
  node: string;
  pid: number;
  incarnation: string;
  kv_blocks_used: number;
  kv_blocks_free: number;
  num_streams: number;
  /** Of its last message. */
  seen: number;
  draft: DraftWorker | null;
  trainer: TrainerWorker | null;
}

export interface DraftWorker {
  live: string;
  canary: string;
  resident: string[];
  /** False while it has not yet taken up the plan in force. */
  is_current: boolean;
  swap_ms: number;
  refused: { version: string; reason: string }[];
}

export interface TrainerWorker {
  run_id: string;
  state: string;
  level: GuardLevel;
  cpu_s: number;
}

// --- versions ---------------------------------------------------------------------------------------------

/**
 * candidate: trained; scored or not (see `gate`), waits. rejected: the gate said no. canary, live: serves.
 * retired: was live, another took over. rolled_back: was canary or live and worse. stale: its target is not served any more.
 * revoked: never served again: by an operator, or because data it was trained on was deleted.
 */
export type VersionState =
  | "candidate"
  | "rejected"
  | "canary"
  | "live"
  | "retired"
  | "rolled_back"
  | "stale"
  | "revoked";

/** GET /admin/api/versions?state=&tag=&q=&cursor=&limit= -> Page<Version>; `q` searches id, reason and tag. */
export interface Version {
  version: string;
  state: VersionState;
  /** Why it is in that state, one sentence. */
  reason: string;
  /** "" for a draft that was not trained here. */
  parent: string;
  tag: string;
  created: number;
  /** Why it exists: "shipped", "imported", or the id of the run that made it. */
  run_id: string;
  pinned: boolean;
  canary_share: number;
  /** Overall saving at the gate, if it was scored. */
  gate: { passed: boolean; saving: Interval } | null;
  /** While it served, all domains; null if it never did. */
  acceptance: number | null;
  tokens_per_step: number | null;
  num_requests: number;
}

/** GET /admin/api/versions/{version} -> VersionDetail */
export interface VersionDetail extends Version {
  target: string;
  url: string;
  sha256: string;
  num_bytes: number;
  num_parameters: number;
  /** What it was trained on: counts by tenant, most first. Tenants are names of keys, never text. */
  trained_on: { tenant: string; num_requests: number; num_tokens: number }[];
  /** Capture shards, so that a deletion finds it. */
  num_shards: number;
  data_from: number | null;
  data_to: number | null;
  report: GateReport | null;
  /** Its own life, oldest first. */
  history: { at: number; state: VersionState; who: string; reason: string }[];
}

/** GET /admin/api/lineage -> Lineage. Versions oldest first, so a parent stands before its children. */
export interface Lineage {
  nodes: LineageNode[];
}

export interface LineageNode {
  version: string;
  parent: string;
  state: VersionState;
  tag: string;
  created: number;
  run_id: string;
  num_requests: number;
  saving: number | null;
  pinned: boolean;
}

// --- gate -------------------------------------------------------------------------------------------------

/** GET /admin/api/reports/{version} -> GateReport (404: never scored). */
export interface GateReport {
  version: string;
  champion: string;
  at: number;
  passed: boolean;
  reason: string;
  num_requests: number;
  num_tokens: number;
  /** Of decode time, candidate against champion. */
  saving: Interval;
  /** The lower end must be above this. */
  min_saving: number;
  /** No domain may be significantly below this. */
  domain_floor: number;
  domains: GateDomain[];
  /** Candidate's forward against the champion's: <= max_slowdown. */
  slowdown: number | null;
  max_slowdown: number;
  champion_tokens_per_step: number | null;
  candidate_tokens_per_step: number | null;
  champion_acceptance: number | null;
  candidate_acceptance: number | null;
}

export interface GateDomain {
  domain: string;
  num_requests: number;
  saving: Interval;
  passed: boolean;
}

// --- runs -------------------------------------------------------------------------------------------------

export type RunState =
  | "pending"
  | "loading"
  | "training"
  | "scoring"
  | "paused"
  | "done"
  | "failed"
  | "stopped";

/** GET /admin/api/runs?state=&cursor=&limit= -> Page<RunSummary> */
export interface RunSummary {
  run_id: string;
  kind: "train" | "score";
  state: RunState;
  tag: string;
  base: string;
  /** What it made; "" until it is published. */
  result: string;
  /** Who or what began it: "loop: drift in code", "ops". */
  why: string;
  created: number;
  started: number | null;
  ended: number | null;
  step: number;
  num_steps: number;
  num_tokens: number;
  loss: number | null;
  tokens_per_s: number | null;
  /** Of wall time without pauses, and of processor time. */
  seconds: number;
  cpu_s: number;
  eta_s: number | null;
  level: GuardLevel;
  error: string;
}

/** GET /admin/api/runs/{run_id} -> RunDetail */
export interface RunDetail extends RunSummary {
  /** Oldest first, thinned to at most 600. */
  loss_curve: LossPoint[];
  settings: Record<string, unknown>;
  ledger: LedgerRow | null;
}

export interface LossPoint {
  step: number;
  loss: number;
  acceptance: number | null;
}

// --- ledger -----------------------------------------------------------------------------------------------

/** GET /admin/api/ledger?cursor=&limit= -> Ledger */
export interface Ledger {
  runs: LedgerRow[];
  total: LedgerTotal;
  /** Decisions not to do something, newest first. */
  decisions: LedgerDecision[];
  next: string | null;
}

export interface LedgerRow {
  run_id: string;
  version: string;
  tag: string;
  at: number;
  /** Seconds of decode time. Predicted by the gate for its horizon; realised so far; negative = it cost time. */
  predicted_s: number | null;
  realised_s: number | null;
  /** Worker seconds that training and scoring took. */
  spent_s: number;
  /** still_serving: realised grows on. */
  still_serving: boolean;
}

export interface LedgerTotal {
  predicted_s: number;
  realised_s: number;
  spent_s: number;
  /** realised - spent */
  net_s: number;
  num_runs: number;
}

export interface LedgerDecision {
  at: number;
  what: "do_not_train" | "do_not_speculate";
  tag: string;
  reason: string;
  /** Where the reason is a sum. */
  expected_saving_s: number | null;
  expected_cost_s: number | null;
  /** null while it still holds. */
  until: number | null;
}

// --- drift and guard --------------------------------------------------------------------------------------

/** GET /admin/api/drift -> DriftDomain[], most requests first. */
export interface DriftDomain {
  domain: string;
  num_requests: number;
  /** Exponential means of acceptance. */
  short: number | null;
  long: number | null;
  /** Fires when short < long - epsilon. */
  epsilon: number;
  /** Page-Hinkley statistic and its threshold: fires when above. */
  page_hinkley: number;
  page_hinkley_threshold: number;
  drifted: boolean;
  since: number | null;
  /** What the loop did or will do: "re-selected 1a2b...", "waits for 120 more requests". */
  action: string;
}

/** GET /admin/api/guard -> Guard */
export interface Guard {
  now: GuardNow;
  readings: GuardReading[];
  /** Changes of level, newest first, at most 200. */
  history: GuardChange[];
  /** Seconds at each level in the last 24 h. */
  time_at: Record<GuardLevel, number>;
}

export interface GuardReading {
  name: "ttft_p99_ms" | "inter_token_p99_ms" | "queue" | "kv_use";
  now: number | null;
  limit: number;
  /** Training pauses above. */
  pause_at: number;
  /** Training goes on below, after a while. */
  resume_at: number;
}

export interface GuardChange {
  at: number;
  from: GuardLevel;
  to: GuardLevel;
  reason: string;
}

// --- figures over time ------------------------------------------------------------------------------------

/**
 * GET /admin/api/figures?window_s=3600&version=&domain= -> Figures. `step_s` is chosen so that there are at most 600 buckets, and
 * bucket starts are multiples of it. The page adds what the event `figures` brings, and loads all anew from time to time.
 */
export interface Figures {
  from: number;
  to: number;
  step_s: number;
  series: FigureSeries[];
  depths: DepthRow[];
  marks: Mark[];
  domains: string[];
}

/** Of one version and one domain. "" as domain: requests that named none. Sum over domains for all of them. */
export interface FigureSeries {
  version: string;
  domain: string;
  /** Oldest first; buckets with nothing are left out. */
  points: FigurePoint[];
}

/** Counts, so that any sum of buckets gives the right ratio: acceptance = accepted / tested, tokens per step = tokens / steps. */
export interface FigurePoint {
  /** Start of the bucket. */
  at: number;
  num_requests: number;
  num_tokens: number;
  num_steps: number;
  num_tested: number;
  num_accepted: number;
  /** Of decoding. */
  seconds: number;
}

/** Over the whole window. */
export interface DepthRow {
  version: string;
  domain: string;
  /** From 1. */
  depth: number;
  num_tested: number;
  num_accepted: number;
}

export interface Mark {
  at: number;
  kind: "swap" | "canary" | "promote" | "rollback" | "drift" | "train" | "gate";
  version: string;
  tag: string;
  /** For the tooltip: "promoted by ops: saves 4.1 %". */
  text: string;
}

// --- capture and consent ----------------------------------------------------------------------------------

/** GET /admin/api/capture -> Capture */
export interface Capture {
  enabled: boolean;
  /** Why it is off or broken; "" when it works. */
  reason: string;
  storage: string;
  num_requests: number;
  num_held_out: number;
  num_tokens: number;
  num_bytes: number;
  max_bytes: number;
  oldest: number | null;
  newest: number | null;
  ttl_s: number;
  /** Name of the hook, "none" without one. */
  redact: string;
  counters: CaptureCounters;
  tenants: CaptureTenant[];
  /** Newest first, at most 50. */
  deletions: Deletion[];
}

/** Since control started. */
export interface CaptureCounters {
  num_seen: number;
  num_kept: number;
  /** `"store": false` */
  num_opted_out: number;
  /** Tenant or operator did not agree, or the request said nothing. */
  num_no_consent: number;
  /** Queue full or storage broken: dropped, newest first. */
  num_dropped: number;
  num_redacted: number;
  num_expired: number;
  num_deleted: number;
}

export interface CaptureTenant {
  tenant: string;
  /** What holds for requests that say nothing. */
  default_consent: boolean;
  num_requests: number;
  num_tokens: number;
  num_bytes: number;
  /** null: it is not counted by tenant. */
  num_opted_out: number | null;
  /** Of what is kept; null where nothing is. */
  share: number | null;
}

export interface Deletion {
  id: string;
  at: number;
  who: string;
  /** "tenant:NAME" or "request:ID" */
  what: string;
  state: "pending" | "done" | "failed";
  num_requests: number;
  /** Versions that had learned from it. */
  versions: string[];
}

// --- audit ------------------------------------------------------------------------------------------------

/** GET /admin/api/audit?who=&action=&q=&since=&until=&cursor=&limit= -> Page<AuditRow> */
export interface AuditRow {
  id: number;
  at: number;
  /** Name of the admin key, "loop" for what happened by itself. */
  who: string;
  /** Address it came from; "" for the loop. */
  address: string;
  /** "sign_in", "sign_out", "sign_in_failed", "settings", or an ActionName, or what the loop did ("promote", "roll_back", "refuse"...). */
  action: string;
  /** Version, run, tenant, setting: what was acted upon. */
  subject: string;
  detail: string;
  ok: boolean;
}

// --- settings ---------------------------------------------------------------------------------------------

/** GET /admin/api/settings -> Setting[]
 *  PATCH /admin/api/settings (CSRF): body SettingsChange -> Setting[]; all or nothing, 422 names the field. */
export interface Setting {
  /** Path in the configuration: "learning.gate.min_saving" */
  name: string;
  /** "Gate", "Rollout", "Guard", "Training", "Capture" */
  section: string;
  label: string;
  help: string;
  kind: "number" | "integer" | "boolean" | "choice" | "text";
  /** For numbers: "s", "ms", "h", "requests", "share", "" */
  unit: string;
  value: number | boolean | string;
  /** What the configuration file says: shown as "reset to". */
  configured: number | boolean | string;
  min: number | null;
  max: number | null;
  choices: string[];
  /** False: shown, and set in the configuration file only. */
  editable: boolean;
}

export interface SettingsChange {
  /** name -> value; null goes back to the configured one. */
  values: Record<string, number | boolean | string | null>;
}

// --- API keys ---------------------------------------------------------------------------------------------

/** user opens the API at gateways, admin opens Control. */
export type KeyScope = "user" | "admin";
/** What of a key's requests may be kept for training: none, those with store=true, those without store=false. */
export type CaptureRule = "never" | "asked" | "default";

/** 0 is no limit, or in a key the configuration's. */
export interface KeyLimits {
  requests_per_minute: number;
  tokens_per_minute: number;
  concurrency: number;
}

export interface ApiKey {
  /** Part of the key's text, and all of it that is ever shown. */
  id: string;
  name: string;
  tenant: string;
  scope: KeyScope;
  capture: CaptureRule;
  created: number;
  revoked: number | null;
  limits: KeyLimits;
}

/** GET /admin/api/keys -> Keys. */
export interface Keys {
  /** The latest first. */
  keys: ApiKey[];
  /** Whether gateways let nobody in without one. */
  asked: boolean;
  /** Of keys without limits of their own. */
  defaults: KeyLimits;
  /** Why the key file cannot be read; "" if it can. */
  trouble: string;
}

/** POST /admin/api/keys (CSRF): body KeyCreate -> CreatedKey. Audited, as all changes of keys are, those by command too. */
export interface KeyCreate {
  name: string;
  /** Whose requests those with it are; the name, if left out. */
  tenant?: string;
  scope?: KeyScope;
  capture?: CaptureRule;
  requests_per_minute?: number;
  tokens_per_minute?: number;
  concurrency?: number;
}

export interface CreatedKey {
  key: ApiKey;
  /** Its text: kept nowhere, never shown again. */
  secret: string;
}

/** PATCH /admin/api/keys/{id} (CSRF): body KeyUpdate -> ApiKey; what is left out stays. DELETE revokes: -> ApiKey. */
export interface KeyUpdate {
  capture?: CaptureRule;
  requests_per_minute?: number;
  tokens_per_minute?: number;
  concurrency?: number;
}

// --- actions ----------------------------------------------------------------------------------------------

/**
 * POST /admin/api/actions/{name} (CSRF): body ActionBody -> ActionResult. All are audited, also those refused.
 * A tag is "" (everything that has no version of its own), "tenant:NAME" or "domain:NAME".
 *
 * name         body                        what happens
 * train        tag                         a run begins now, or as soon as the guard allows (409: one is on; learning is off)
 * forget       run_id                      the run ends; nothing is published
 * pause        -                           no run and no canary begins by itself, until resume
 * resume       -
 * canary       version, tag                it gets a share of the tag's streams (409: the gate refused it and `force` is not set)
 * promote      version, tag, force         it becomes live for the tag; for a tag that had none of its own this is its route (409 as above)
 * pin          tag                         nothing automatic changes the tag's version
 * unpin        tag
 * roll_back    tag                         ends its canary if there is one, else goes back to the version before (409: there is none)
 * revoke       version                     it is never served again; where it is live the version before takes over
 * delete       tenant | request_id         captured data goes from shards, reservoir, held-out set and checkpoints
 *
 * The same action by the same actor within 2 s is a double click: it is done once and both get its answer.
 */
export type ActionName =
  | "train"
  | "forget"
  | "pause"
  | "resume"
  | "canary"
  | "promote"
  | "pin"
  | "unpin"
  | "roll_back"
  | "revoke"
  | "delete";

export interface ActionBody {
  version?: string;
  run_id?: string;
  tag?: string;
  tenant?: string;
  request_id?: string;
  /** Against the gate's answer. */
  force?: boolean;
  /**
   * Asked once: forget, roll_back, revoke, delete and a forced canary or promote are refused (422, field "confirm") unless this
   * repeats what they act upon: the run, the version, "tenant:NAME", "request:ID", or the tag ("everything" for "").
   */
  confirm?: string;
  /** Free text for the audit. */
  reason?: string;
}

export interface ActionResult {
  /** One sentence: what was done or begun. */
  message: string;
  /** Of the run, deletion or version it concerns; "" else. */
  id: string;
}

// --- events -----------------------------------------------------------------------------------------------

/**
 * GET /admin/api/events: text/event-stream, by cookie or bearer key. `event:` is the key below, `data:` its JSON on one line.
 * Level-triggered: who connects gets `overview` and `workers` at once, then loads what it shows. A comment every 15 s keeps it open.
 * A stream whose session ends gets `signed_out` and is closed.
 */
export interface Events {
  /** Each second. */
  overview: Overview;
  /** Each second. */
  workers: Worker[];
  /** Each second in which streams ended or something happened: what it added. `at` of a point is that second: the page adds it to the
   *  bucket it belongs to. */
  figures: FiguresDelta;
  /** At most each second: what to load again. */
  changed: Changed;
  signed_out: Record<string, never>;
}

export interface FiguresDelta {
  points: (FigurePoint & { version: string; domain: string })[];
  depths: DepthRow[];
  marks: Mark[];
}

export type Resource =
  | "versions"
  | "runs"
  | "ledger"
  | "drift"
  | "guard"
  | "capture"
  | "audit"
  | "settings"
  | "keys";

export interface Changed {
  what: Resource[];
}
