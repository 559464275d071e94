// runs -> a table; one run -> its loss curve, speed, cost and outcome.
import { type ReactNode, useMemo } from "react";
import type { RunDetail, RunState, RunSummary } from "../api.ts";
import { count, duration, fixed, percent, tagName } from "../format.ts";
import { useLive, useResource } from "../live.tsx";
import { lookOf } from "../look.ts";
import { forget, trainNow } from "../parts/actions.tsx";
import { Chart } from "../parts/chart.tsx";
import { useAsk } from "../parts/confirm.tsx";
import { LedgerBars } from "../parts/drawings.tsx";
import { More, usePages } from "../parts/pages.tsx";
import { Ago, At, Bar, Button, Choice, type Column, Empty, Facts, Failure, LevelBadge, Panel, RunBadge, Table, VersionLink, Waiting } from "../parts/ui.tsx";
import { link, useFilters } from "../route.ts";

const STATES: RunState[] = ["pending", "loading", "training", "scoring", "paused", "done", "failed", "stopped"];
const RUNNING: RunState[] = ["pending", "loading", "training", "scoring", "paused"];

export function TrainingPage({ run }: { run: string }) {
  return run ? <Detail run={run} key={run} /> : <All />;
}

const COLUMNS: Column<RunSummary>[] = [
  {
    key: "run",
    head: "Run",
    cell: (row) => (
      <a className="nowrap" href={link("training", row.run_id)}>
        <code>{row.run_id}</code>
      </a>
    ),
  },
  { key: "kind", head: "Kind", cell: (row) => row.kind },
  { key: "state", head: "State", cell: (row) => <RunBadge state={row.state} /> },
  { key: "why", head: "Why", cell: (row) => row.why || "–" },
  { key: "tag", head: "For", cell: (row) => tagName(row.tag) },
  { key: "step", head: "Steps", number: true, cell: (row) => `${row.step} / ${row.num_steps}` },
  { key: "loss", head: "Loss", number: true, cell: (row) => fixed(row.loss, 3) },
  { key: "speed", head: "Tokens/s", number: true, cell: (row) => count(row.tokens_per_s) },
  { key: "cpu", head: "CPU", number: true, cell: (row) => duration(row.cpu_s) },
  { key: "created", head: "Begun", cell: (row) => <Ago time={row.started ?? row.created} /> },
  { key: "result", head: "Made", cell: (row) => (row.result ? <VersionLink version={row.result} /> : row.error ? <span className="bad">failed</span> : "–") },
];

function All() {
  const ask = useAsk();
  const { overview } = useLive();
  const [read, write] = useFilters();
  const state = read("state");
  const list = usePages<RunSummary>("runs", { state, limit: 50 }, ["runs"]);
  const isOff = overview?.learning.state === "off";
  return (
    <>
      <div className="title-row">
        <h1>Training</h1>
        {!isOff && (
          <Button tone="primary" onClick={() => ask(trainNow())}>
            Train now
          </Button>
        )}
      </div>
      <Panel title="Runs" hint={overview?.learning.reason ?? ""}>
        <div className="filters">
          <Choice label="State" value={state} options={[["", "any"], ...STATES.map((one) => [one, one] as const)]} onChange={(value) => write({ state: value })} />
        </div>
        {list.error && <Failure error={list.error} retry={list.reload} />}
        {list.items === null ? (
          !list.error && <Waiting />
        ) : list.items.length === 0 ? (
          <Empty title={state ? "No run is in that state." : "No runs yet."}>
            {!state &&
              (isOff ? (
                <p>
                  Learning is off: start the cluster with <code>--set learning.enabled=true</code>.
                </p>
              ) : (
                "One begins when a trigger fires, or with Train now."
              ))}
          </Empty>
        ) : (
          <>
            <Table label="Runs" columns={COLUMNS} rows={list.items} rowKey={(row) => row.run_id} />
            <More list={list} shown={list.items.length} />
          </>
        )}
      </Panel>
    </>
  );
}

function Detail({ run }: { run: string }) {
  const ask = useAsk();
  const { data, error, reload } = useResource<RunDetail>(`runs/${encodeURIComponent(run)}`, ["runs", "ledger"]);
  return (
    <>
      <p className="crumbs">
        <a href={link("training")}>Training</a>
      </p>
      <div className="title-row">
        <h1>
          Run <code>{run}</code>
        </h1>
        {data && RUNNING.includes(data.state) && (
          <Button tone="danger" onClick={() => ask(forget(run))}>
            Stop
          </Button>
        )}
      </div>
      {error && <Failure error={error} retry={reload} />}
      {data ? <Body run={data} /> : !error && <Waiting />}
    </>
  );
}

const SETTING: Record<string, string> = {
  target: "Target",
  since: "Fresh since",
  look: "Look at the held-out requests",
  streams: "Streams in a step",
  step_rows: "Rows of a step",
  step_seconds: "Seconds of such a step",
  rank: "Compared",
  train: "Training, changed",
  gate: "Gate, changed",
  family: "Scores the result of",
  candidate: "Candidate",
};

function setting(name: string, value: unknown): ReactNode {
  if (name === "since" && typeof value === "number") return <At key={name} time={value} />;
  return <code key={name}>{typeof value === "string" ? value : JSON.stringify(value)}</code>;
}

function Body({ run }: { run: RunDetail }) {
  const loss = useMemo(
    () => [{ key: "loss", name: "loss", look: lookOf(0), points: run.loss_curve.map((point) => [point.step, point.loss] as const) }],
    [run.loss_curve],
  );
  const acceptance = useMemo(
    () => [
      {
        key: "acceptance",
        name: "acceptance on held-out requests",
        look: lookOf(2),
        points: run.loss_curve.flatMap((point) => (point.acceptance === null ? [] : [[point.step, point.acceptance] as const])),
      },
    ],
    [run.loss_curve],
  );
  const settings = Object.entries(run.settings);
  return (
    <>
      {run.error && (
        <div className="notice bad" role="alert">
          <strong>{run.error}</strong>
        </div>
      )}
      <div className="masonry">
        <Panel title="Loss" hint="A falling loss is no proof: the gate decides on held-out requests.">
          <Chart label="Loss by step" lines={loss} format={(value) => fixed(value, 3)} x="number" xName="step" empty="No step was done yet." />
        </Panel>
        <Panel title="Progress" hint={run.why}>
          <Bar label="Steps" share={run.step / Math.max(1, run.num_steps)} text={`step ${run.step} of ${run.num_steps}`} />
          <Facts
            items={[
              ["State", <RunBadge key="s" state={run.state} />],
              ["Step", `${run.step} of ${run.num_steps}`],
              ["Ready in", run.eta_s === null ? "–" : duration(Math.round(run.eta_s))],
              ["Guard lets it", <LevelBadge key="l" level={run.level} />],
              ["For", tagName(run.tag)],
              ["From", <VersionLink key="b" version={run.base} />],
              ["Made", <VersionLink key="r" version={run.result} />],
              ["Tokens", `${count(run.num_tokens)}, ${count(run.tokens_per_s)} per second`],
              ["Time", `${duration(run.seconds)}, pauses left out`],
              ["Processor time", duration(run.cpu_s)],
              ["Begun", <At key="a" time={run.started ?? run.created} />],
              ["Ended", <At key="e" time={run.ended} />],
            ]}
          />
        </Panel>
        {acceptance[0]!.points.length > 0 && (
          <Panel title="Acceptance while training">
            <Chart label="Acceptance by step" lines={acceptance} format={(value) => percent(value)} x="number" xName="step" />
          </Panel>
        )}
        {run.ledger && (
          <Panel title="Did it pay?" actions={<a href={link("ledger")}>Ledger</a>}>
            <LedgerBars rows={[run.ledger]} />
          </Panel>
        )}
        {settings.length > 0 && (
          <Panel title="Settings of this run">
            <Facts items={settings.map(([name, value]) => [SETTING[name] ?? name, setting(name, value)])} />
          </Panel>
        )}
      </div>
    </>
  );
}
