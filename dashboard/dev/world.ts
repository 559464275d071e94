// a clock -> a made-up cluster that learns: for working on the pages without one. Nothing of it is in the bundle.
import type {
  ActionBody,
  ActionName,
  ApiKey,
  AuditRow,
  Capture,
  CreatedKey,
  DepthRow,
  DriftDomain,
  FigurePoint,
  Figures,
  FiguresDelta,
  GateReport,
  Guard,
  KeyCreate,
  KeyLimits,
  Keys,
  KeyUpdate,
  Ledger,
  LineageNode,
  Mark,
  Overview,
  RunDetail,
  Setting,
  Version,
  VersionDetail,
  VersionState,
  Worker,
} from "../src/api.ts";

const DOMAINS = ["chat", "code", "support", ""];

interface Draft {
  version: string;
  state: VersionState;
  parent: string;
  created: number;
  run: string;
  reason: string;
  /** True acceptance. */
  skill: number;
  saving: number | null;
  pinned: boolean;
  served: number;
}

export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly action = "",
    readonly field: string | null = null,
  ) {
    super(message);
  }
}

const now = () => Date.now() / 1000;

/** Repeats for the same seed. */
function random(seed: number): number {
  const x = Math.sin(seed * 127.1 + 311.7) * 43758.5453;
  return x - Math.floor(x);
}

export class World {
  readonly began = now();
  isOff = false;
  isEmpty = false;
  isPaused = false;
  drafts: Draft[] = [];
  marks: Mark[] = [];
  audit: AuditRow[] = [];
  changed = new Set<string>();
  run: RunDetail | null = null;
  runs: RunDetail[] = [];
  private canarySince = 0;
  private canaryRequests = 0;
  private lastDelta = Math.floor(now());
  private fresh: Mark[] = [];

  constructor() {
    const start = this.began;
    const add = (version: string, state: VersionState, parent: string, ago: number, skill: number, saving: number | null, reason: string, run: string) =>
      this.drafts.push({ version, state, parent, created: start - ago, run, reason, skill, saving, pinned: false, served: Math.round((skill ** 2) * 9000) });
    add("9f31c04a77e2", "retired", "", 86400 * 2, 0.41, null, "replaced by 51d0b2e8aa19", "shipped");
    add("51d0b2e8aa19", "retired", "9f31c04a77e2", 5400, 0.52, 0.083, "replaced by c8e1f7702b4d", "run-0001");
    add("e07a5512cc90", "rejected", "51d0b2e8aa19", 4100, 0.49, -0.021, "saving of decode time is −2.1 % [−3.4 %, −0.9 %]: not above +1.0 %", "run-0002");
    add("b6612fd35e01", "rolled_back", "51d0b2e8aa19", 3000, 0.5, 0.024, "canary was slower than the champion by 1.9 %", "run-0003");
    add("c8e1f7702b4d", "live", "51d0b2e8aa19", 1500, 0.62, 0.071, "promoted after 240 canary requests: saves 6.8 %", "run-0004");
    add("2ab49d10ff67", "candidate", "c8e1f7702b4d", 60, 0.66, 0.034, "passed the gate, waits for a canary", "run-0005");
    const mark = (ago: number, kind: Mark["kind"], version: string, text: string) => this.marks.push({ at: start - ago, kind, version, tag: "", text });
    mark(3300, "canary", "b6612fd35e01", "5 % of streams");
    mark(2900, "rollback", "b6612fd35e01", "slower by 1.9 %");
    mark(2100, "drift", "", "code: 0.44, before 0.52");
    mark(1450, "canary", "c8e1f7702b4d", "5 % of streams");
    mark(1200, "promote", "c8e1f7702b4d", "saves 6.8 %");
    mark(60, "gate", "2ab49d10ff67", "passed: saves 3.4 %");
    this.drafts.slice(1).forEach((draft, i) => {
      this.runs.unshift({
        run_id: draft.run, kind: "train", state: "done", tag: "", base: draft.parent, result: draft.version,
        why: i % 2 ? "loop: 512 new requests" : "loop: drift in code", created: draft.created - 400, started: draft.created - 380, ended: draft.created,
        step: 200, num_steps: 200, num_tokens: 819_200, loss: 1.31 - i * 0.08, tokens_per_s: 2150, seconds: 381, cpu_s: 612, eta_s: null, level: "normal", error: "",
        loss_curve: Array.from({ length: 200 }, (_, step) => ({ step: step + 1, loss: 1.2 - i * 0.05 + 1.1 * Math.exp(-step / 40) + random(step + i) * 0.08, acceptance: step % 40 === 39 ? 0.45 + step / 1200 : null })),
        settings: { loss: "hybrid", learning_rate: 0.0002, batch_tokens: 4096 }, ledger: null,
      });
    });
    this.note("loop", "promote", "c8e1f7702b4d", "saves 6.8 % [4.1 %, 9.4 %]", start - 1200);
    this.note("loop", "roll_back", "b6612fd35e01", "canary was slower by 1.9 %", start - 2900);
    this.startRun("loop: 512 new requests");
  }

  note(who: string, action: string, subject: string, detail: string, at = now(), ok = true): void {
    this.audit.unshift({ id: this.audit.length + 1, at, who, address: who === "loop" ? "" : "127.0.0.1", action, subject, detail, ok });
    this.changed.add("audit");
  }

  private mark(kind: Mark["kind"], version: string, text: string): void {
    const mark: Mark = { at: now(), kind, version, tag: "", text };
    this.marks.push(mark);
    this.fresh.push(mark);
  }

  private by(state: VersionState): Draft | undefined {
    return this.drafts.find((draft) => draft.state === state);
  }

  startRun(why: string): void {
    const number = String(this.runs.length + 1).padStart(4, "0");
    this.run = {
      run_id: `run-${number}`, kind: "train", state: "training", tag: "", base: this.by("live")?.version ?? "", result: "", why, created: now() - 30, started: now() - 25, ended: null,
      step: 40, num_steps: 200, num_tokens: 0, loss: 1.6, tokens_per_s: 2100, seconds: 25, cpu_s: 31, eta_s: 90, level: "normal", error: "",
      loss_curve: Array.from({ length: 40 }, (_, step) => ({ step: step + 1, loss: 1.1 + 1.1 * Math.exp(-step / 40) + random(step) * 0.08, acceptance: null })),
      settings: { loss: "hybrid" }, ledger: null,
    };
    this.runs.unshift(this.run);
    this.changed.add("runs");
  }

  /** One second passes. */
  tick(): void {
    const canary = this.by("canary");
    if (canary) {
      this.canaryRequests += 6;
      if (this.canaryRequests >= 200) this.serve(canary.version, "loop");
    }
    const run = this.run;
    if (run && !this.isPaused) {
      run.step += 1;
      run.seconds += 1;
      run.cpu_s += 1.3;
      run.num_tokens += 4096;
      run.eta_s = (run.num_steps - run.step) * 0.9;
      run.loss = 1.05 + 1.1 * Math.exp(-run.step / 40) + random(run.step) * 0.08;
      run.loss_curve.push({ step: run.step, loss: run.loss, acceptance: null });
      if (run.step >= run.num_steps) {
        run.state = "done";
        run.ended = now();
        this.run = null;
      }
      this.changed.add("runs");
    }
  }

  private serve(version: string, who: string): void {
    for (const draft of this.drafts) if (draft.state === "live") Object.assign(draft, { state: "retired", reason: `replaced by ${version}` });
    const draft = this.drafts.find((one) => one.version === version)!;
    Object.assign(draft, { state: "live", reason: `promoted by ${who}` });
    this.mark("promote", version, `by ${who}`);
    if (who === "loop") this.note("loop", "promote", version, "canary saves 3.1 % [1.2 %, 5.0 %]");
    this.changed.add("versions");
  }

  act(name: ActionName, body: ActionBody): { message: string; id: string } {
    const subject = body.version ?? body.run_id ?? body.tag ?? body.tenant ?? body.request_id ?? "";
    const draft = this.drafts.find((one) => one.version === body.version);
    const live = this.by("live");
    this.changed.add("versions").add("audit").add("settings");
    const done = (message: string) => {
      this.note("key:5a1c", name, subject, body.reason ?? "");
      return { message, id: subject };
    };
    switch (name) {
      case "train":
        if (this.run) throw new Refusal(409, `${this.run.run_id} is on.`, "Wait for it, or stop it.");
        this.startRun("key:5a1c");
        return done("A run has begun.");
      case "pause":
        this.isPaused = true;
        return done("Learning is paused.");
      case "resume":
        this.isPaused = false;
        return done("Learning goes on.");
      case "canary":
        if (draft) draft.state = "canary";
        this.canarySince = now();
        this.canaryRequests = 0;
        this.mark("canary", subject, "5 % of streams");
        return done(`${subject} gets 5 % of streams.`);
      case "promote":
        this.serve(subject, "key:5a1c");
        return done(`${subject} is live.`);
      case "pin":
      case "unpin":
        if (live) live.pinned = name === "pin";
        return done(name === "pin" ? `${live?.version} is pinned.` : "Unpinned.");
      case "roll_back": {
        const canary = this.by("canary");
        const gone = canary ?? live;
        if (!gone) throw new Refusal(409, "There is nothing to roll back.");
        gone.state = "rolled_back";
        this.mark("rollback", gone.version, "by key:5a1c");
        if (!canary) {
          const before = this.drafts.find((one) => one.version === gone.parent);
          if (before) before.state = "live";
        }
        return done(`${gone.version} was rolled back.`);
      }
      case "revoke":
        if (draft) draft.state = "revoked";
        return done(`${subject} is revoked.`);
      default:
        return done("Done.");
    }
  }

  overview(): Overview {
    const live = this.by("live");
    const canary = this.by("canary");
    const at = now();
    const wave = 0.01 * Math.sin(at / 7);
    return {
      at,
      model: "paceline-tiny",
      learning: this.isOff
        ? { state: "off", reason: "learning.enabled is false: drafts stay as they were shipped.", until: null, is_paused: false }
        : {
            state: this.isPaused ? "paused" : canary ? "canary" : this.run ? "training" : "waiting",
            reason: this.isPaused
              ? "Paused by key:5a1c. Capture goes on."
              : canary
                ? `${canary.version} drafts for 5 % of streams.`
                : this.run
                  ? `Run ${this.run.run_id}: step ${this.run.step} of ${this.run.num_steps}, because 512 requests are new.`
                  : "312 of 500 new requests; no domain has drifted.",
            until: null,
            is_paused: this.isPaused,
          },
      live: live ? { version: live.version, since: this.began - 1200, by: "loop", pinned: live.pinned } : null,
      canary: canary
        ? {
            version: canary.version, tag: "", share: 0.05, since: this.canarySince, num_requests: this.canaryRequests,
            num_drafted: Math.max(0, this.canaryRequests - 30), min_requests: 200, is_weak: this.canaryRequests < 40,
            saving: this.canaryRequests < 60 ? null : { mean: 0.031, lo: 0.004, hi: 0.058 },
          }
        : null,
      routes: this.isOff ? [] : [{ tag: "tenant:acme", version: "51d0b2e8aa19" }],
      acceptance: this.isEmpty ? { now: null, hour: null } : { now: 0.624 + wave, hour: 0.587 },
      tokens_per_step: this.isEmpty ? { now: null, hour: null } : { now: 2.81 + wave * 4, hour: 2.52 },
      tokens_per_s: this.isEmpty ? { now: null, hour: null } : { now: 1184 + wave * 900, hour: 1012 },
      ttft_p99_ms: this.isEmpty ? null : 212,
      inter_token_p99_ms: this.isEmpty ? null : 38.4,
      num_streams: this.isEmpty ? 0 : 14,
      speculation: { on: true, reason: "", num_on: 2, num_workers: 2 },
      guard: { level: "normal", reason: "all readings under 70 % of their limits", since: this.began - 900 },
      alarms: this.isOff ? [] : [{ id: "storage", severity: "warning", message: "Storage is 82 % full.", hint: "Raise learning.capture.max_mb or wait: the oldest goes first.", since: this.began - 340 }],
      triggers: this.isOff
        ? []
        : [
            { name: "data", label: "New requests", fires_at: 500, now: 312, unit: "requests", direction: "above", tag: "" },
            { name: "drift", label: "Acceptance in code", fires_at: 0.5, now: 0.58, unit: "", direction: "below", tag: "domain:code" },
          ],
      run: this.isOff ? null : this.run,
    };
  }

  workers(): Worker[] {
    const base = { version: "t-77ab", node: "node-1", incarnation: "1", seen: now(), draft: null, trainer: null, kv_blocks_used: 0, kv_blocks_free: 0, num_streams: 0, state: "ready" };
    const use = (i: number) => Math.round(500 + 380 * Math.sin(now() / 11 + i));
    return [
      { ...base, id: "gateway-0", role: "gateway", pid: 4101, num_streams: 14, version: "" },
      { ...base, id: "router-0", role: "router", pid: 4102, version: "" },
      { ...base, id: "prefill-0", role: "prefill", pid: 4103, kv_blocks_used: 120, kv_blocks_free: 904 },
      ...[0, 1].map((i): Worker => ({ ...base, id: `decode-${i}`, role: "decode", pid: 4104 + i, kv_blocks_used: use(i), kv_blocks_free: 1024 - use(i), num_streams: 7 })),
      {
        ...base, id: "draft-0", role: "draft", pid: 4110, kv_blocks_used: 80, kv_blocks_free: 432, num_streams: 14,
        draft: { live: this.by("live")?.version ?? "", canary: this.by("canary")?.version ?? "", resident: ["c8e1f7702b4d", "51d0b2e8aa19", "2ab49d10ff67"], is_current: true, swap_ms: 0.84, refused: [{ version: "e07a5512cc90", reason: "model.safetensors: sha256 differs" }] },
      },
      { ...base, id: "trainer-0", role: "trainer", pid: 4120, version: "", trainer: { run_id: this.run?.run_id ?? "", state: this.run ? "training" : "idle", level: "normal", cpu_s: 31 } },
      { ...base, id: "control-0", role: "control", pid: 4099, version: "" },
    ];
  }

  summary(draft: Draft): Version {
    const gate = draft.saving === null ? null : { passed: draft.state !== "rejected", saving: { mean: draft.saving, lo: draft.saving - 0.018, hi: draft.saving + 0.018 } };
    const served = ["candidate", "rejected"].includes(draft.state) ? 0 : draft.served;
    return {
      version: draft.version, state: draft.state, reason: draft.reason, parent: draft.parent, tag: "", created: draft.created, run_id: draft.run, pinned: draft.pinned,
      canary_share: draft.state === "canary" ? 0.05 : 0, gate, acceptance: served ? draft.skill : null, tokens_per_step: served ? 1 + draft.skill * 2.9 : null, num_requests: served,
    };
  }

  report(draft: Draft): GateReport | null {
    const gate = this.summary(draft).gate;
    if (!gate) return null;
    const mean = gate.saving.mean;
    return {
      version: draft.version, champion: draft.parent, at: draft.created, passed: gate.passed, reason: draft.state === "rejected" ? draft.reason : `saves ${(mean * 100).toFixed(1)} % of decode time`,
      num_requests: 400, num_tokens: 51_200, saving: gate.saving, min_saving: 0.01, domain_floor: -0.02,
      domains: DOMAINS.map((domain, i) => {
        const shift = (i - 1.2) * 0.012;
        return { domain, num_requests: 160 - i * 30, saving: { mean: mean + shift, lo: mean + shift - 0.03, hi: mean + shift + 0.03 }, passed: mean + shift + 0.03 > -0.02 };
      }),
      slowdown: 1.004, max_slowdown: 1.02, champion_tokens_per_step: 2.5, candidate_tokens_per_step: 2.5 * (1 + mean), champion_acceptance: 0.52, candidate_acceptance: draft.skill,
    };
  }

  detail(version: string): VersionDetail {
    const draft = this.drafts.find((one) => one.version === version);
    if (!draft) throw new Refusal(404, `There is no version ${version}.`);
    return {
      ...this.summary(draft), target: "t-77ab", url: draft.parent ? `file:///var/paceline/learning/drafts/${version}` : "", sha256: version.repeat(5) + "abcd", num_bytes: 12_400_000, num_parameters: 3_100_000,
      trained_on: draft.parent ? [{ tenant: "acme", num_requests: 312, num_tokens: 41_000 }, { tenant: "beta", num_requests: 200, num_tokens: 22_500 }] : [],
      num_shards: draft.parent ? 14 : 0, data_from: draft.parent ? draft.created - 9000 : null, data_to: draft.parent ? draft.created - 400 : null, report: this.report(draft),
      history: [{ at: draft.created, state: "candidate", who: "loop", reason: "trained by " + draft.run }, ...(draft.state === "candidate" ? [] : [{ at: draft.created + 200, state: draft.state, who: "loop", reason: draft.reason }])],
    };
  }

  lineage(): { nodes: LineageNode[] } {
    return { nodes: this.drafts.map((draft) => ({ version: draft.version, parent: draft.parent, state: draft.state, tag: "", created: draft.created, run_id: draft.run, num_requests: draft.served, saving: draft.saving, pinned: draft.pinned })) };
  }

  private point(at: number, width: number, skill: number, domain: string, share: number): FigurePoint {
    const i = DOMAINS.indexOf(domain);
    const steps = Math.max(1, Math.round(60 * width * share * (0.6 + 0.8 * random(at + i))));
    const rate = Math.min(0.95, Math.max(0.05, skill + (1.5 - i) * 0.04 + (random(at * 3 + i) - 0.5) * 0.08));
    const tested = steps * 3;
    const accepted = Math.round(tested * rate);
    return { at, num_requests: Math.max(1, Math.round(steps / 40)), num_tokens: steps + accepted, num_steps: steps, num_tested: tested, num_accepted: accepted, seconds: steps * 0.021 };
  }

  private serving(at: number): { draft: Draft; share: number }[] {
    const age = this.began - at;
    const find = (version: string) => this.drafts.find((draft) => draft.version === version)!;
    if (age <= 0) {
      const live = this.by("live");
      const canary = this.by("canary");
      return [...(live ? [{ draft: live, share: canary ? 0.95 : 1 }] : []), ...(canary ? [{ draft: canary, share: 0.05 }] : [])];
    }
    if (age < 1200) return [{ draft: find("c8e1f7702b4d"), share: 1 }];
    if (age < 1450) return [{ draft: find("51d0b2e8aa19"), share: 0.95 }, { draft: find("c8e1f7702b4d"), share: 0.05 }];
    if (age > 2900 && age < 3300) return [{ draft: find("51d0b2e8aa19"), share: 0.95 }, { draft: find("b6612fd35e01"), share: 0.05 }];
    return [{ draft: find(age > 5000 ? "9f31c04a77e2" : "51d0b2e8aa19"), share: 1 }];
  }

  figures(windowS: number): Figures {
    const to = now();
    const step = Math.max(1, Math.ceil(windowS / 300));
    const from = to - windowS;
    const series = new Map<string, { version: string; domain: string; points: FigurePoint[] }>();
    if (!this.isEmpty)
      for (let at = Math.ceil(from / step) * step; at < to; at += step)
        for (const { draft, share } of this.serving(at))
          for (const domain of DOMAINS) {
            const key = `${draft.version} ${domain}`;
            if (!series.has(key)) series.set(key, { version: draft.version, domain, points: [] });
            series.get(key)!.points.push(this.point(at, step, draft.skill, domain, share));
          }
    return { from, to, step_s: step, series: [...series.values()], depths: [...series.values()].flatMap((line) => this.depths(line.version, line.domain, 900)), marks: this.isEmpty ? [] : this.marks.filter((mark) => mark.at >= from), domains: this.isEmpty ? [] : DOMAINS };
  }

  private depths(version: string, domain: string, tested: number): DepthRow[] {
    const skill = this.drafts.find((draft) => draft.version === version)?.skill ?? 0.5;
    return [1, 2, 3, 4, 5].map((depth) => ({ version, domain, depth, num_tested: Math.round(tested * skill ** (depth - 1)), num_accepted: Math.round(tested * skill ** depth * (1.1 - depth * 0.03)) }));
  }

  delta(): FiguresDelta {
    const at = Math.floor(now());
    const points = this.isEmpty || at === this.lastDelta ? [] : this.serving(now()).flatMap(({ draft, share }) => DOMAINS.map((domain) => ({ version: draft.version, domain, ...this.point(at, 1, draft.skill, domain, share) })));
    this.lastDelta = at;
    return { points, depths: [], marks: this.fresh.splice(0) };
  }

  ledger(): Ledger {
    if (this.isOff) return { runs: [], total: { predicted_s: 0, realised_s: 0, spent_s: 0, net_s: 0, num_runs: 0 }, decisions: [], next: null };
    const t = this.began;
    return {
      runs: [
        { run_id: "run-0004", version: "c8e1f7702b4d", tag: "", at: t - 1500, predicted_s: 1900, realised_s: 742, spent_s: 612, still_serving: true },
        { run_id: "run-0003", version: "b6612fd35e01", tag: "", at: t - 3000, predicted_s: 480, realised_s: -38, spent_s: 590, still_serving: false },
        { run_id: "run-0002", version: "e07a5512cc90", tag: "", at: t - 4100, predicted_s: -410, realised_s: 0, spent_s: 575, still_serving: false },
        { run_id: "run-0001", version: "51d0b2e8aa19", tag: "", at: t - 5400, predicted_s: 2100, realised_s: 2480, spent_s: 640, still_serving: false },
        { run_id: "run-0005", version: "2ab49d10ff67", tag: "", at: t - 60, predicted_s: 820, realised_s: null, spent_s: 600, still_serving: false },
      ],
      total: { predicted_s: 4890, realised_s: 3184, spent_s: 3017, net_s: 167, num_runs: 5 },
      decisions: [
        { at: t - 700, what: "do_not_train", tag: "domain:support", reason: "expected saving is less than the run costs", expected_saving_s: 210, expected_cost_s: 590, until: null },
        { at: t - 2600, what: "do_not_speculate", tag: "", reason: "48 streams: a step with drafts is slower than without", expected_saving_s: null, expected_cost_s: null, until: t - 2400 },
      ],
      next: null,
    };
  }

  drift(): DriftDomain[] {
    if (this.isOff) return [];
    return DOMAINS.map((domain, i) => ({
      domain, num_requests: 4200 - i * 900, short: 0.62 - i * 0.05, long: 0.61 - i * 0.03, epsilon: 0.02, page_hinkley: 0.8 + i * 1.6, page_hinkley_threshold: 5, drifted: i === 3, since: i === 3 ? this.began - 400 : null,
      action: i === 3 ? "waits for 120 more requests" : "",
    }));
  }

  guard(): Guard {
    return {
      now: this.overview().guard,
      readings: [
        { name: "ttft_p99_ms", now: 212, limit: 2000, pause_at: 1800, resume_at: 1400 },
        { name: "inter_token_p99_ms", now: 38.4, limit: 200, pause_at: 180, resume_at: 140 },
        { name: "queue", now: 3, limit: 32, pause_at: 29, resume_at: 22 },
        { name: "kv_use", now: 0.78, limit: 0.9, pause_at: 0.81, resume_at: 0.63 },
      ],
      history: this.isOff ? [] : [
        { at: this.began - 900, from: "pause", to: "normal", reason: "all readings under 70 % of their limits for 60 s" },
        { at: this.began - 1010, from: "normal", to: "pause", reason: "inter-token p99 was 191 ms of 200 ms" },
      ],
      time_at: { normal: 80_100, throttle: 3300, pause: 2800, evict: 200 },
    };
  }

  capture(): Capture {
    const on = !this.isOff;
    return {
      enabled: on, reason: "", storage: "file:///var/paceline/learning", num_requests: on ? 2914 : 0, num_held_out: on ? 151 : 0, num_tokens: on ? 402_113 : 0, num_bytes: on ? 268_000_000 : 0, max_bytes: 1_073_741_824,
      oldest: on ? this.began - 200_000 : null, newest: on ? now() - 3 : null, ttl_s: 259_200, redact: "none",
      counters: { num_seen: on ? 6120 : 0, num_kept: on ? 2914 : 0, num_opted_out: on ? 812 : 0, num_no_consent: on ? 2390 : 0, num_dropped: on ? 4 : 0, num_redacted: 0, num_expired: on ? 311 : 0, num_deleted: on ? 12 : 0 },
      tenants: on ? [
        { tenant: "acme", default_consent: true, num_requests: 1900, num_tokens: 260_000, num_bytes: 174_000_000, num_opted_out: 12, share: 0.5 },
        { tenant: "beta", default_consent: false, num_requests: 1014, num_tokens: 142_113, num_bytes: 94_000_000, num_opted_out: 800, share: 0.31 },
      ] : [],
      deletions: on ? [{ id: "d1", at: this.began - 7000, who: "key:5a1c", what: "request:req-91ab", state: "done", num_requests: 1, versions: ["51d0b2e8aa19"] }] : [],
    };
  }

  apiKeys: ApiKey[] = [
    { id: "0a1b2c3d4e5f", name: "web", tenant: "acme", scope: "user", capture: "default", created: now() - 900_000, revoked: null, limits: { requests_per_minute: 600, tokens_per_minute: 200_000, concurrency: 32 } },
    { id: "5a1c00000000", name: "alice", tenant: "alice", scope: "admin", capture: "never", created: now() - 800_000, revoked: null, limits: { requests_per_minute: 0, tokens_per_minute: 0, concurrency: 0 } },
    { id: "77aa11bb22cc", name: "old ci", tenant: "old ci", scope: "user", capture: "never", created: now() - 990_000, revoked: now() - 5000, limits: { requests_per_minute: 0, tokens_per_minute: 0, concurrency: 0 } },
  ];

  keys(): Keys {
    return { keys: [...this.apiKeys].reverse(), asked: !this.isOff, defaults: { requests_per_minute: 0, tokens_per_minute: 0, concurrency: 8 }, trouble: "" };
  }

  makeKey({ name, tenant, scope, capture, ...limits }: KeyCreate): CreatedKey {
    const id = Math.floor(random(this.apiKeys.length) * 0xffffffffffff).toString(16).padStart(12, "0");
    const all: KeyLimits = { requests_per_minute: 0, tokens_per_minute: 0, concurrency: 0, ...limits };
    const key: ApiKey = { id, name, tenant: tenant || name, scope: scope ?? "user", capture: capture ?? "never", created: now(), revoked: null, limits: all };
    this.apiKeys.push(key);
    this.note("key:5a1c", "key_create", id, "");
    this.changed.add("keys");
    return { key, secret: `pl_${id}_${"x".repeat(43)}` };
  }

  changeKey(id: string, body: KeyUpdate | null): ApiKey {
    const key = this.apiKeys.find((one) => one.id === id);
    if (!key) throw new Refusal(404, `there is no key ${id}`);
    if (body === null) key.revoked = now();
    else {
      const { capture, ...limits } = body;
      key.capture = capture ?? key.capture;
      key.limits = { ...key.limits, ...limits };
    }
    this.note("key:5a1c", body === null ? "key_revoke" : "key_change", id, "");
    this.changed.add("keys");
    return key;
  }

  settings(): Setting[] {
    const make = (section: string, name: string, label: string, help: string, value: number | boolean | string, more: Partial<Setting> = {}): Setting => ({
      name: `learning.${name}`, section, label, help, kind: typeof value === "number" ? "number" : typeof value === "boolean" ? "boolean" : "choice", unit: "", value, configured: value, min: 0, max: 100_000, choices: [], editable: true, ...more,
    });
    return [
      make("Training", "train.min_requests", "Min requests", "New ones before a run begins by itself.", 500, { kind: "integer", unit: "requests", min: 1 }),
      make("Training", "train.loss", "Loss", "kl: forward, with a rest bucket. tv: total variation.", "hybrid", { choices: ["kl", "tv", "hybrid", "adaspec"] }),
      make("Gate", "gate.min_saving", "Min saving", "Of decode time: the lower end of its 95 % interval must be above this.", 0.01, { unit: "share", max: 1, configured: 0.02 }),
      make("Rollout", "rollout.automatic", "Automatic", "False: candidates wait for somebody to promote them.", true),
      make("Rollout", "rollout.canary_share", "Canary share", "Of streams that get the candidate first; 0 promotes at once.", 0.05, { unit: "share", max: 0.5 }),
      make("Guard", "guard.inter_token_p99_ms", "Inter token p99", "What requests must not exceed.", 200, { unit: "ms" }),
      make("Capture", "capture.ttl_h", "Ttl", "After so many hours it is deleted.", 72, { unit: "h", editable: false }),
    ];
  }
}
