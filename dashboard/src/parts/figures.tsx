// figures -> the two charts of acceptance and tokens per step, with window, domain and marks.
import { useMemo } from "react";
import type { Figures } from "../api.ts";
import { depthsOf, linesOf, useFigures } from "../figures.ts";
import { domainName, fixed, percent } from "../format.ts";
import { useNow } from "../live.tsx";
import { useFilters } from "../route.ts";
import { Chart, MarkList } from "./chart.tsx";
import { Depths } from "./drawings.tsx";
import { Choice, Empty, Failure, Panel, Segments, Waiting } from "./ui.tsx";

const WINDOWS = [
  ["900", "15 min"],
  ["3600", "1 h"],
  ["21600", "6 h"],
  ["86400", "1 d"],
  ["604800", "7 d"],
] as const;
type Window = (typeof WINDOWS)[number][0];
const EVERY = "*";

export function FigurePanels({ isLearning }: { isLearning: boolean }) {
  const [read, write] = useFilters();
  const window = (WINDOWS.find(([value]) => value === read("window"))?.[0] ?? "3600") as Window;
  const { figures, error, reload } = useFigures(Number(window));
  const chosen = read("domain") || EVERY;
  const domain = chosen === EVERY ? null : chosen === "-" ? "" : chosen;
  const domains = [
    [EVERY, "all domains"] as const,
    ...(figures?.domains ?? []).map((name) => [name || "-", domainName(name)] as const),
  ];
  return (
    <>
      <div className="bar-of-controls">
        <h2>Over time</h2>
        <Segments label="Window" value={window} options={WINDOWS} onChange={(value) => write({ window: value })} />
        <Choice label="Domain" value={chosen} options={domains} onChange={(value) => write({ domain: value === EVERY ? "" : value })} />
      </div>
      {error && <Failure error={error} retry={reload} />}
      {figures ? <Charts figures={figures} domain={domain} isLearning={isLearning} /> : !error && <Waiting />}
    </>
  );
}

function Charts({ figures, domain, isLearning }: { figures: Figures; domain: string | null; isLearning: boolean }) {
  const acceptance = useMemo(() => linesOf(figures, "acceptance", domain), [figures, domain]);
  const steps = useMemo(() => linesOf(figures, "tokens_per_step", domain), [figures, domain]);
  const to = Math.max(figures.to, useNow());
  const from = to - (figures.to - figures.from);
  const depths = useMemo(() => depthsOf(figures, domain), [figures, domain]);
  if (acceptance.length === 0 && steps.length === 0) {
    return (
      <Panel title="Acceptance and tokens per step">
        <Empty title="No requests in this time.">
          <p>{isLearning ? "The charts fill as streams end." : "Send requests to /v1/completions, or choose a longer window."}</p>
        </Empty>
      </Panel>
    );
  }
  return (
    <div className="grid two">
      <Panel title="Acceptance" hint="Of the draft's tokens that were tested, by version.">
        <Chart
          label="Acceptance over time by version"
          lines={acceptance}
          marks={figures.marks}
          format={(value) => percent(value, 0)}
          from={from}
          to={to}
          empty="No draft model drafted in this time."
        />
      </Panel>
      <Panel title="Tokens per step" hint="What each forward pass of the target brings. 1 is no gain.">
        <Chart
          label="Tokens per step over time by version"
          lines={steps}
          marks={figures.marks}
          format={(value) => fixed(value, 2)}
          from={from}
          to={to}
        />
      </Panel>
      <Panel title="What happened" hint="The lines in the charts above.">
        {figures.marks.length ? <MarkList marks={figures.marks} /> : <Empty title="No swap, canary or roll back in this time." />}
      </Panel>
      <Panel title="Acceptance by depth" hint="Of tokens at that place in the draft whose parent was accepted.">
        {depths.length ? <Depths groups={depths} /> : <Empty title="Nothing was drafted in this time." />}
      </Panel>
    </div>
  );
}
