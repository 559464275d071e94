// drift by domain and the guard's readings -> how near each is to acting, and what was done.
import type { DriftDomain, Guard, GuardLevel, GuardReading } from "../api.ts";
import { count, domainName, duration, fixed, percent } from "../format.ts";
import { useResource } from "../live.tsx";
import { trainNow } from "../parts/actions.tsx";
import { useAsk } from "../parts/confirm.tsx";
import { Ago, Badge, Bar, Button, Empty, Failure, LevelBadge, Panel, Table, Waiting } from "../parts/ui.tsx";

export function DriftPage() {
  const drift = useResource<DriftDomain[]>("drift", ["drift"]);
  const guard = useResource<Guard>("guard", ["guard"]);
  return (
    <>
      <h1>Drift and guard</h1>
      {drift.error && <Failure error={drift.error} retry={drift.reload} />}
      <Panel title="Drift by domain" hint="Acceptance of late against acceptance of before. First another version is looked for, then one is trained.">
        {drift.data ? <Domains domains={drift.data} /> : !drift.error && <Waiting />}
      </Panel>
      {guard.error && <Failure error={guard.error} retry={guard.reload} />}
      {guard.data ? <GuardPanels guard={guard.data} /> : !guard.error && <Waiting />}
    </>
  );
}

function Domains({ domains }: { domains: DriftDomain[] }) {
  const ask = useAsk();
  if (domains.length === 0) return <Empty title="No domain was seen yet.">Clients name one in metadata.domain; the rest counts as one domain.</Empty>;
  return (
    <Table
      label="Drift by domain"
      rows={domains}
      rowKey={(row) => row.domain}
      columns={[
        { key: "domain", head: "Domain", cell: (row) => <strong>{domainName(row.domain)}</strong> },
        { key: "state", head: "State", cell: (row) => <Badge tone={row.drifted ? "warn" : "good"}>{row.drifted ? "drifted" : "steady"}</Badge> },
        { key: "requests", head: "Requests", number: true, cell: (row) => count(row.num_requests) },
        {
          key: "short",
          head: "Acceptance: late / before",
          cell: (row) => (
            <>
              {percent(row.short)} / {percent(row.long)}
              {row.long !== null && <small className="muted"> fires below {percent(row.long - row.epsilon)}</small>}
            </>
          ),
        },
        {
          key: "ph",
          head: "Page-Hinkley",
          cell: (row) => (
            <>
              <Bar
                label="Page-Hinkley"
                share={row.page_hinkley / (row.page_hinkley_threshold || 1)}
                tone={row.drifted ? "warn" : "info"}
                text={`${fixed(row.page_hinkley, 2)}, fires above ${fixed(row.page_hinkley_threshold, 2)}`}
              />
              <small className="muted">
                {fixed(row.page_hinkley, 2)}, fires above {fixed(row.page_hinkley_threshold, 2)}
              </small>
            </>
          ),
        },
        { key: "since", head: "Since", cell: (row) => <Ago time={row.since} /> },
        { key: "action", head: "What is done", cell: (row) => row.action || "–" },
        {
          key: "train",
          head: "Act",
          cell: (row) => (
            <Button onClick={() => ask(trainNow(row.domain ? `domain:${row.domain}` : ""))} aria-label={`Train now for ${domainName(row.domain)}`}>
              Train now
            </Button>
          ),
        },
      ]}
    />
  );
}

const LEVELS: GuardLevel[] = ["normal", "throttle", "pause", "evict"];
const LEVEL_HELP: Record<GuardLevel, string> = {
  normal: "training may use what is free",
  throttle: "smaller steps, with sleep between them",
  pause: "no training; its state stays in memory",
  evict: "training gives its device back",
};

function GuardPanels({ guard }: { guard: Guard }) {
  const day = LEVELS.reduce((sum, level) => sum + (guard.time_at[level] ?? 0), 0);
  return (
    <div className="grid two">
      <Panel title="Guard now" hint="Training yields before requests suffer.">
        <p>
          <LevelBadge level={guard.now.level} /> since <Ago time={guard.now.since} />. {guard.now.reason}
        </p>
        {guard.readings.map((reading) => (
          <Reading key={reading.name} reading={reading} />
        ))}
      </Panel>
      <Panel title="Last 24 hours">
        {LEVELS.map((level) => (
          <div className="trigger" key={level}>
            <p>
              <span>
                <LevelBadge level={level} /> <span className="muted">{LEVEL_HELP[level]}</span>
              </span>
              <span className="trigger-numbers">
                <strong>{duration(Math.round(guard.time_at[level] ?? 0))}</strong>
              </span>
            </p>
            <Bar label={level} share={day ? (guard.time_at[level] ?? 0) / day : 0} text={duration(guard.time_at[level] ?? 0)} />
          </div>
        ))}
      </Panel>
      <Panel title="Changes of level" className="wide-panel">
        {guard.history.length ? (
          <Table
            label="Changes of level"
            rows={guard.history}
            rowKey={(row) => `${row.at}${row.from}${row.to}`}
            columns={[
              { key: "at", head: "When", cell: (row) => <Ago time={row.at} /> },
              {
                key: "to",
                head: "Change",
                cell: (row) => (
                  <>
                    {row.from} → <LevelBadge level={row.to} />
                  </>
                ),
              },
              { key: "why", head: "Why", cell: (row) => row.reason },
            ]}
          />
        ) : (
          <Empty title="The level never changed." />
        )}
      </Panel>
    </div>
  );
}

const NAMES: Record<GuardReading["name"], [string, (value: number) => string]> = {
  ttft_p99_ms: ["First token, p99", (value) => `${fixed(value)} ms`],
  inter_token_p99_ms: ["Between tokens, p99", (value) => `${fixed(value, value < 10 ? 1 : 0)} ms`],
  queue: ["Streams of the busiest decode worker", (value) => fixed(value)],
  kv_use: ["Fullest KV pool", (value) => percent(value, 0)],
};

function Reading({ reading }: { reading: GuardReading }) {
  const [name, format] = NAMES[reading.name] ?? [reading.name, String];
  const now = reading.now;
  const tone = now === null ? "plain" : now >= reading.pause_at ? "bad" : now >= reading.resume_at ? "warn" : "good";
  const text = `${now === null ? "not measured" : format(now)}, limit ${format(reading.limit)}`;
  return (
    <div className="trigger">
      <p>
        <span>{name}</span>
        <span className="trigger-numbers">
          <strong>{now === null ? "–" : format(now)}</strong> of {format(reading.limit)}; pauses at {format(reading.pause_at)}, goes on under {format(reading.resume_at)}
        </span>
      </p>
      <Bar
        label={name}
        share={now === null ? 0 : now / (reading.limit || 1)}
        tone={tone}
        text={text}
        marks={[
          { at: reading.resume_at / (reading.limit || 1), label: "goes on under" },
          { at: reading.pause_at / (reading.limit || 1), label: "pauses at" },
        ]}
      />
    </div>
  );
}
