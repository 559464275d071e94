// overview -> what drafts, how well, what the loop does and why, and the buttons to steer it.
import type { ReactNode } from "react";
import type { Canary, Overview, Trigger } from "../api.ts";
import { change, count, duration, fixed, percent, tagName } from "../format.ts";
import { useLive } from "../live.tsx";
import { LEVEL_TONE, type Tone } from "../look.ts";
import { pause, resume, rollBack, trainNow } from "../parts/actions.tsx";
import { useAsk } from "../parts/confirm.tsx";
import { FigurePanels } from "../parts/figures.tsx";
import { Ago, Badge, Bar, Button, Empty, Facts, LevelBadge, Panel, RunBadge, VersionLink, Waiting } from "../parts/ui.tsx";
import { link } from "../route.ts";

const STATE: Record<Overview["learning"]["state"], [Tone, string]> = {
  off: ["plain", "Learning is off"],
  paused: ["warn", "Paused"],
  waiting: ["good", "Waiting for a reason to train"],
  blocked: ["warn", "Not training"],
  training: ["info", "Training"],
  scoring: ["info", "Scoring a candidate"],
  preparing: ["info", "Preparing a candidate"],
  canary: ["info", "Canary running"],
  watching: ["info", "Watching a new version"],
  frozen: ["bad", "Frozen after a roll back"],
};

export function OverviewPage() {
  const { overview } = useLive();
  return (
    <>
      <h1>Overview</h1>
      {overview ? <Body overview={overview} /> : <Waiting />}
      <FigurePanels isLearning={overview?.learning.state !== "off"} />
    </>
  );
}

function Body({ overview }: { overview: Overview }) {
  const isOff = overview.learning.state === "off";
  return (
    <>
      {overview.alarms.map((alarm) => (
        <div key={alarm.id} className={`notice ${alarm.severity === "critical" ? "bad" : "warn"}`} role="alert">
          <div>
            <strong>
              {alarm.severity === "critical" ? "Alarm: " : "Warning: "}
              {alarm.message}
            </strong>{" "}
            {alarm.hint} <Ago time={alarm.since} />
          </div>
        </div>
      ))}
      <Learning overview={overview} />
      {isOff && <TurnOn />}
      <Tiles overview={overview} />
      {!isOff && (
        <div className="grid two">
          {overview.canary && <CanaryPanel canary={overview.canary} live={overview.live?.version ?? ""} />}
          {overview.run && <RunPanel overview={overview} />}
          <Panel title="Next run" hint="Any one of these begins it.">
            {overview.triggers.length ? (
              overview.triggers.map((trigger) => <TriggerRow key={trigger.name + trigger.tag} trigger={trigger} />)
            ) : (
              <Empty title="No trigger is set.">Only Train now begins a run.</Empty>
            )}
          </Panel>
          {overview.routes.length > 0 && (
            <Panel title="Routes" hint="Tenants and domains with a version of their own.">
              <Facts items={overview.routes.map((route) => [tagName(route.tag), <VersionLink key={route.tag} version={route.version} />])} />
            </Panel>
          )}
        </div>
      )}
    </>
  );
}

function Learning({ overview }: { overview: Overview }) {
  const ask = useAsk();
  const { learning, live, canary } = overview;
  const [tone, name] = STATE[learning.state] ?? ["plain", learning.state];
  return (
    <section className={`hero ${tone}`} aria-label="Learning">
      <div>
        <p className="hero-state">
          <Badge tone={tone}>{name}</Badge>
        </p>
        <p className="hero-reason">{learning.reason}</p>
        {learning.until && <p className="muted">Ends in {duration(Math.max(0, Math.round(learning.until - overview.at)))}.</p>}
      </div>
      {learning.state !== "off" && (
        <div className="hero-buttons">
          <Button tone="primary" onClick={() => ask(trainNow())}>
            Train now
          </Button>
          {learning.is_paused ? (
            <Button onClick={() => ask(resume())}>Resume</Button>
          ) : (
            <Button onClick={() => ask(pause())}>Pause</Button>
          )}
          <Button tone="danger" disabled={!live} onClick={() => live && ask(rollBack(live.version, canary?.tag ?? "", canary?.version ?? ""))}>
            {canary ? "End canary" : "Roll back"}
          </Button>
        </div>
      )}
    </section>
  );
}

function TurnOn() {
  return (
    <Panel title="Let the draft learn from your traffic">
      <p>
        Start the cluster with <code>paceline serve --set learning.enabled=true</code>, or set <code>learning.enabled: true</code> in its
        configuration. Only requests of tenants and clients that agreed are kept, for a while, and can be deleted at any time. A
        candidate serves only after it has proved itself.
      </p>
      <p className="muted">The figures below are measured either way.</p>
    </Panel>
  );
}

function Tile({ name, value, children, tone }: { name: string; value: ReactNode; children?: ReactNode; tone?: Tone }) {
  return (
    <div className={`tile ${tone ?? ""}`}>
      <dt>{name}</dt>
      <dd>
        <span className="tile-value">{value}</span>
        <span className="tile-sub">{children}</span>
      </dd>
    </div>
  );
}

function Tiles({ overview }: { overview: Overview }) {
  const { acceptance, tokens_per_step: steps, tokens_per_s: speed, live, speculation, guard } = overview;
  return (
    <dl className="tiles">
      <Tile name="Acceptance" value={percent(acceptance.now)}>
        {percent(acceptance.hour)} in the last hour
      </Tile>
      <Tile name="Tokens per step" value={fixed(steps.now, 2)}>
        {fixed(steps.hour, 2)} in the last hour
      </Tile>
      <Tile name="Tokens per second" value={count(speed.now)}>
        {count(overview.num_streams)} streams, {count(speed.hour)} in the last hour
      </Tile>
      <Tile name="Between tokens" value={overview.inter_token_p99_ms === null ? "–" : `${fixed(overview.inter_token_p99_ms)} ms`}>
        99th percentile, last 10 s
      </Tile>
      <Tile name="Live draft" value={live ? <VersionLink version={live.version} /> : "none"}>
        {live ? (
          <>
            {live.pinned ? "pinned, " : ""}since <Ago time={live.since} />, by {live.by}
          </>
        ) : (
          "no draft model serves"
        )}
      </Tile>
      <Tile name="First token" value={overview.ttft_p99_ms === null ? "–" : `${fixed(overview.ttft_p99_ms)} ms`}>
        99th percentile, last 10 s
      </Tile>
      <Tile name="Speculation" value={<Badge tone={speculation.on ? "good" : "warn"}>{speculation.on ? "on" : "off"}</Badge>}>
        {speculation.reason || `in ${speculation.num_on} of ${speculation.num_workers} decode workers`}
      </Tile>
      <Tile name="Guard" value={<LevelBadge level={guard.level} />} tone={LEVEL_TONE[guard.level]}>
        {guard.reason}
      </Tile>
    </dl>
  );
}

function CanaryPanel({ canary, live }: { canary: Canary; live: string }) {
  return (
    <Panel title="Canary" hint={`${percent(canary.share, 0)} of streams of ${tagName(canary.tag)}, chosen by request id.`}>
      <p className="versus">
        <VersionLink version={canary.version} /> against <VersionLink version={live} />
      </p>
      <Bar
        label="Drafted requests before a decision"
        share={canary.num_drafted / Math.max(1, canary.min_requests)}
        text={`${canary.num_drafted} of ${canary.min_requests} drafted requests`}
      />
      <p>
        {count(canary.num_drafted)} of {count(canary.min_requests)} drafted requests, since <Ago time={canary.since} />.{" "}
        {!canary.is_weak &&
          (canary.saving
            ? `So far it saves ${change(canary.saving.mean)} (${change(canary.saving.lo)} to ${change(canary.saving.hi)}).`
            : "Too few to tell yet.")}
      </p>
      {canary.is_weak && (
        <p>
          <Badge tone="warn">Weak evidence</Badge> Of {count(canary.num_requests)} requests, drafts were tried in{" "}
          {canary.num_drafted ? count(canary.num_drafted) : "none"}: it waits for more. While drafting is off, nothing can be shown.
        </p>
      )}
    </Panel>
  );
}

function RunPanel({ overview }: { overview: Overview }) {
  const run = overview.run!;
  return (
    <Panel title={run.kind === "train" ? "Run" : "Scoring"} hint={run.why} actions={<a href={link("training", run.run_id)}>Details</a>}>
      <p className="versus">
        <RunBadge state={run.state} /> <code>{run.run_id}</code> from <VersionLink version={run.base} />
      </p>
      <Bar label="Steps" share={run.step / Math.max(1, run.num_steps)} text={`step ${run.step} of ${run.num_steps}`} />
      <p>
        Step {run.step} of {run.num_steps}
        {run.loss !== null && `, loss ${fixed(run.loss, 3)}`}
        {run.tokens_per_s !== null && `, ${count(run.tokens_per_s)} tokens/s`}
        {run.eta_s !== null && `, ready in ${duration(Math.round(run.eta_s))}`}
      </p>
    </Panel>
  );
}

function TriggerRow({ trigger }: { trigger: Trigger }) {
  const number = (value: number) => (Number.isInteger(value) ? count(value) : fixed(value, 3));
  const share =
    trigger.direction === "above"
      ? trigger.now / (trigger.fires_at || 1)
      : trigger.now > 0
        ? trigger.fires_at / trigger.now
        : 1;
  return (
    <div className="trigger">
      <p>
        <span>
          {trigger.label}
        </span>
        <span className="trigger-numbers">
          fires {trigger.direction === "above" ? "at" : "below"} {number(trigger.fires_at)}, now <strong>{number(trigger.now)}</strong> {trigger.unit}
        </span>
      </p>
      <Bar label={trigger.label} share={share} text={`fires at ${number(trigger.fires_at)}, now ${number(trigger.now)} ${trigger.unit}`} />
    </div>
  );
}
