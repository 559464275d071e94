// GET figures, and what each second adds -> lines for charts, by version.
import { useEffect, useState } from "react";
import type { DepthRow, FigurePoint, Figures, FiguresDelta } from "./api.ts";
import { get, Refused, withParams } from "./client.ts";
import { useLive } from "./live.tsx";
import { versionLook } from "./look.ts";
import type { Line } from "./parts/chart.tsx";

/** What a second added, put into the buckets it belongs to; what falls out of the window goes. */
export function added(old: Figures, delta: FiguresDelta, now: number): Figures {
  const series = new Map(old.series.map((line) => [`${line.version} ${line.domain}`, line]));
  for (const { version, domain, ...point } of delta.points) {
    if (point.at < Math.floor(old.to)) continue; // was in the answer already
    const key = `${version} ${domain}`;
    const at = point.at - (point.at % old.step_s);
    const line = series.get(key) ?? { version, domain, points: [] };
    const last = line.points[line.points.length - 1];
    const points =
      last && last.at >= at ? [...line.points.slice(0, -1), sum(last, point)] : [...line.points, { ...point, at }];
    series.set(key, { ...line, points });
  }
  const depths = new Map(old.depths.map((row) => [`${row.version} ${row.domain} ${row.depth}`, row]));
  for (const row of delta.depths) {
    const key = `${row.version} ${row.domain} ${row.depth}`;
    const known = depths.get(key);
    depths.set(key, {
      ...row,
      num_tested: row.num_tested + (known?.num_tested ?? 0),
      num_accepted: row.num_accepted + (known?.num_accepted ?? 0),
    });
  }
  const from = now - (old.to - old.from);
  const known = new Set(old.marks.map((mark) => `${mark.at} ${mark.kind} ${mark.version}`));
  return {
    ...old,
    series: [...series.values()].map((line) => ({
      ...line,
      points: line.points[0] && line.points[0].at < from - old.step_s ? line.points.filter((point) => point.at >= from - old.step_s) : line.points,
    })),
    depths: [...depths.values()],
    marks: [...old.marks, ...delta.marks.filter((mark) => !known.has(`${mark.at} ${mark.kind} ${mark.version}`))],
    domains: [...new Set([...old.domains, ...delta.points.map((point) => point.domain)])].sort(),
  };
}

const RELOAD_MS = 60_000;
/** A chart is drawn anew this often at most. */
const DRAW_MS = 1000;

export interface Shown {
  figures: Figures | null;
  error: Refused | null;
  reload: () => void;
}

export function useFigures(windowS: number): Shown {
  const { subscribeFigures } = useLive();
  const [state, setState] = useState<{ windowS: number; figures: Figures | null; error: Refused | null }>({
    windowS,
    figures: null,
    error: null,
  });
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    let isOver = false;
    let held: Figures | null = null;
    let timer: number | undefined;
    const show = () => {
      if (timer !== undefined) return;
      timer = window.setTimeout(() => {
        timer = undefined;
        if (!isOver) setState({ windowS, figures: held, error: null });
      }, DRAW_MS);
    };
    const load = () => {
      get<Figures>(withParams("figures", { window_s: windowS })).then(
        (answer) => {
          if (isOver) return;
          held = answer;
          setState({ windowS, figures: held, error: null });
        },
        (error: unknown) => {
          if (!isOver) setState({ windowS, figures: held, error: error instanceof Refused ? error : new Refused(0, String(error)) });
        },
      );
    };
    load();
    const interval = window.setInterval(load, RELOAD_MS);
    const stop = subscribeFigures((delta) => {
      if (delta === null) load();
      else if (held) {
        held = added(held, delta, Math.max(held.to, ...delta.points.map((point) => point.at)));
        show();
      }
    });
    return () => {
      isOver = true;
      window.clearInterval(interval);
      window.clearTimeout(timer);
      stop();
    };
  }, [windowS, subscribeFigures, attempt]);
  const isCurrent = state.windowS === windowS;
  return { figures: isCurrent ? state.figures : null, error: state.error, reload: () => setAttempt((old) => old + 1) };
}

export type Ratio = "acceptance" | "tokens_per_step" | "tokens_per_s";

const RATIOS: Record<Ratio, (point: FigurePoint) => number | null> = {
  acceptance: (point) => (point.num_tested > 0 ? point.num_accepted / point.num_tested : null),
  tokens_per_step: (point) => (point.num_steps > 0 ? point.num_tokens / point.num_steps : null),
  tokens_per_s: (point) => (point.seconds > 0 ? point.num_tokens / point.seconds : null),
};

/** One line for each version, over all domains (null) or one of them. */
export function linesOf(figures: Figures, ratio: Ratio, domain: string | null): Line[] {
  const sums = new Map<string, Map<number, FigurePoint>>();
  for (const line of figures.series) {
    if (domain !== null && line.domain !== domain) continue;
    const buckets = sums.get(line.version) ?? new Map<number, FigurePoint>();
    sums.set(line.version, buckets);
    for (const point of line.points) {
      const before = buckets.get(point.at);
      buckets.set(point.at, before ? sum(before, point) : point);
    }
  }
  return [...sums].flatMap(([version, buckets]) => {
    if (ratio === "acceptance" && version === "") return []; // nobody drafted: there is nothing to accept
    const points = [...buckets.values()]
      .sort((a, b) => a.at - b.at)
      .flatMap((point): [number, number][] => {
        const value = RATIOS[ratio](point);
        return value === null ? [] : [[point.at, value]];
      });
    return points.length ? [{ key: version, name: version || "no draft", look: versionLook(version), points }] : [];
  });
}

function sum(a: FigurePoint, b: FigurePoint): FigurePoint {
  return {
    at: a.at,
    num_requests: a.num_requests + b.num_requests,
    num_tokens: a.num_tokens + b.num_tokens,
    num_steps: a.num_steps + b.num_steps,
    num_tested: a.num_tested + b.num_tested,
    num_accepted: a.num_accepted + b.num_accepted,
    seconds: a.seconds + b.seconds,
  };
}

/** Acceptance by depth of each version. */
export function depthsOf(figures: Figures, domain: string | null): { version: string; rows: DepthRow[] }[] {
  const versions = new Map<string, Map<number, DepthRow>>();
  for (const row of figures.depths) {
    if (domain !== null && row.domain !== domain) continue;
    const rows = versions.get(row.version) ?? new Map<number, DepthRow>();
    versions.set(row.version, rows);
    const before = rows.get(row.depth);
    rows.set(row.depth, {
      ...row,
      num_tested: row.num_tested + (before?.num_tested ?? 0),
      num_accepted: row.num_accepted + (before?.num_accepted ?? 0),
    });
  }
  return [...versions].map(([version, rows]) => ({ version, rows: [...rows.values()].sort((a, b) => a.depth - b.depth) }));
}
