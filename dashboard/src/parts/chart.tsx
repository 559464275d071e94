// lines over time, with marks -> a uPlot canvas, a legend that switches lines, a tooltip, and the same as a table.
import { useEffect, useMemo, useRef, useState } from "react";
import uPlot from "uplot";
import type { Mark } from "../api.ts";
import { at, atClock, atFull, tagName } from "../format.ts";
import { type Look, MARK_SHAPE, resolved, useColours } from "../look.ts";
import { Button, Empty, Table } from "./ui.tsx";

export interface Line {
  key: string;
  name: string;
  look: Look;
  /** (x, y), by x. */
  points: readonly (readonly [number, number])[];
}

interface Props {
  /** What it shows, for those who cannot see it. */
  label: string;
  lines: Line[];
  marks?: Mark[];
  format: (value: number) => string;
  /** Of the x axis: time of day, or plain numbers such as steps. */
  x?: "time" | "number";
  xName?: string;
  from?: number;
  to?: number;
  height?: number;
  empty?: string;
}

/** Of a time axis: less would show noise only. */
const SHORTEST_S = 120;

/** All lines on one x axis, as uPlot wants it. */
function align(lines: Line[]): uPlot.AlignedData {
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const index = new Map(xs.map((x, i) => [x, i]));
  const columns = lines.map((line) => {
    const column: (number | null)[] = new Array<number | null>(xs.length).fill(null);
    for (const [x, y] of line.points) column[index.get(x)!] = y;
    return column;
  });
  return [xs, ...columns];
}

function drawMarks(plot: uPlot, marks: Mark[], ink: string, paper: string): void {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ink;
    ctx.lineWidth = ratio;
    ctx.setLineDash(mark.kind === "promote" || mark.kind === "rollback" ? [] : [3 * ratio, 3 * ratio]);
    ctx.globalAlpha = 0.55;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.fillStyle = paper;
    ctx.fillRect(x - 8 * ratio, bbox.top - 9 * ratio, 16 * ratio, 17 * ratio);
    ctx.fillStyle = ink;
    ctx.fillText(MARK_SHAPE[mark.kind] ?? "·", x, bbox.top);
  }
  ctx.restore();
}

export function Chart({ label, lines, marks = [], format, x = "time", xName, from, to, height = 220, empty }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const tip = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const isZoomed = useRef(false); // by dragging; until a double click it stays where it is
  const latest = useRef({ marks, format, lines });
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  const [isTable, setIsTable] = useState(false);
  const colours = useColours();
  const shown = lines.filter((line) => !hidden.has(line.key));
  const data = useMemo(() => align(shown), [lines, hidden]);
  latest.current = { marks, format, lines: shown };
  const shape = `${colours}|${x}|${height}|${shown.map((line) => line.key).join()}`;
  const isEmpty = data[0].length === 0;

  useEffect(() => {
    const element = host.current;
    if (!element || isTable || isEmpty) return;
    const ink = resolved("var(--muted)");
    const paper = resolved("var(--surface)");
    const grid = resolved("var(--line)");
    const axis = {
      stroke: ink,
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
    };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height,
        padding: [14, 12, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
        scales: { x: { time: x === "time" }, y: { range: (_, lo, hi) => padded(lo, hi) } },
        axes: [
          { ...axis, space: 70, size: 30, values: x === "time" ? (_, ticks, __, ___, step) => ticks.map((tick) => tickName(tick, step)) : undefined! },
          { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => latest.current.format(tick)) },
        ],
        series: [
          {},
          ...shown.map((line) => ({
            label: line.name,
            stroke: resolved(line.look.color),
            dash: line.look.dash,
            width: 2,
            spanGaps: true,
            points: { show: line.points.length < 3, size: 6 },
          })),
        ],
        hooks: {
          draw: [(self) => drawMarks(self, latest.current.marks, resolved("var(--text)"), paper)],
          setSelect: [(self) => void (isZoomed.current = self.select.width > 0)],
          setCursor: [(self) => tip.current && showTip(self, tip.current, latest.current, x, xName)],
        },
      },
      data,
      element,
    );
    plot.current = made;
    isZoomed.current = false;
    made.over.addEventListener("dblclick", () => void (isZoomed.current = false));
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
    // `data` is drawn by the next effect; a new canvas is only made when its shape changes.
  }, [shape, isTable, isEmpty]);

  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    made.setData(data, false);
    if (isZoomed.current) {
      made.redraw();
    } else {
      const first = data[0][0];
      const hi = to ?? data[0][data[0].length - 1];
      // A young cluster's minutes fill the chart, not its last hundredth.
      const lo = from === undefined || first === undefined || hi === undefined ? (from ?? first) : Math.max(from, Math.min(first, hi - SHORTEST_S));
      if (lo !== undefined && hi !== undefined) made.setScale("x", { min: lo, max: hi > lo ? hi : lo + 1 });
    }
  }, [data, marks, from, to, shape, isTable]);

  if (lines.every((line) => line.points.length === 0)) return <Empty title={empty ?? "Nothing measured in this time yet."} />;
  return (
    <div className="chart">
      <div className="chart-legend">
        <ul>
          {lines.map((line) => {
            const last = line.points[line.points.length - 1];
            return (
              <li key={line.key}>
                <button
                  type="button"
                  aria-pressed={!hidden.has(line.key)}
                  title={hidden.has(line.key) ? "Show this line" : "Hide this line"}
                  onClick={() => setHidden(toggled(hidden, line.key))}
                >
                  <svg className="swatch" width="18" height="10" aria-hidden="true">
                    <line x1="1" y1="5" x2="17" y2="5" strokeWidth="3" strokeDasharray={line.look.dash.join(" ")} style={{ stroke: line.look.color }} />
                  </svg>
                  <span>{line.name}</span> <strong>{last ? format(last[1]) : "–"}</strong>
                </button>
              </li>
            );
          })}
        </ul>
        <Button tone="quiet" aria-pressed={isTable} onClick={() => setIsTable(!isTable)}>
          {isTable ? "Chart" : "Table"}
        </Button>
      </div>
      {isTable ? (
        <DataTable label={label} lines={shown} data={data} format={format} x={x} xName={xName} />
      ) : (
        <div className="chart-host" role="img" aria-label={summary(label, lines, format)}>
          <div ref={host} />
          <div ref={tip} className="tip" hidden />
        </div>
      )}
    </div>
  );
}

function toggled(set: ReadonlySet<string>, key: string): ReadonlySet<string> {
  const next = new Set(set);
  if (!next.delete(key)) next.add(key);
  return next;
}

function padded(lo: number | null, hi: number | null): [number, number] {
  if (lo === null || hi === null) return [0, 1];
  const room = Math.max((hi - lo) * 0.15, Math.abs(hi) * 0.03, 0.01);
  return [lo >= 0 ? Math.max(0, lo - room) : lo - room, hi + room];
}

function tickName(tick: number, step: number): string {
  const date = new Date(tick * 1000);
  if (step >= 86400) return `${date.getDate()}.${date.getMonth() + 1}.`;
  return step < 60 ? atClock(tick) : atClock(tick).slice(0, 5);
}

function summary(label: string, lines: Line[], format: (value: number) => string): string {
  const parts = lines.map((line) => {
    const last = line.points[line.points.length - 1];
    return last ? `${line.name} ${format(last[1])}` : `${line.name} nothing`;
  });
  return `${label}. Latest: ${parts.join(", ")}. The button Table shows all values.`;
}

function showTip(
  plot: uPlot,
  tip: HTMLDivElement,
  now: { marks: Mark[]; format: (value: number) => string; lines: Line[] },
  x: "time" | "number",
  xName = "",
): void {
  const { left, idx } = plot.cursor;
  if (left === undefined || left < 0 || idx === null || idx === undefined) {
    tip.hidden = true;
    return;
  }
  const value = plot.data[0][idx]!;
  const rows = now.lines.flatMap((line, i) => {
    const y = plot.data[i + 1]?.[idx];
    return y === null || y === undefined ? [] : [`${line.name}  ${now.format(y)}`];
  });
  const near = now.marks.filter((mark) => Math.abs(plot.valToPos(mark.at, "x") - left) < 8);
  const head = x === "time" ? atClock(value) : `${xName} ${value}`;
  tip.textContent = [head, ...rows, ...near.map((mark) => `${MARK_SHAPE[mark.kind] ?? "·"} ${mark.text}`)].join("\n");
  tip.hidden = false;
  const room = plot.over.clientWidth;
  const offset = plot.over.offsetLeft;
  tip.style.left = `${offset + (left > room / 2 ? Math.max(0, left - tip.offsetWidth - 14) : left + 14)}px`;
}

function DataTable(props: { label: string; lines: Line[]; data: uPlot.AlignedData; format: (value: number) => string; x: "time" | "number"; xName?: string | undefined }) {
  const xs = props.data[0];
  const rows = [...xs.keys()].reverse().slice(0, 200);
  return (
    <div className="chart-table">
      <Table
        label={props.label}
        rows={rows}
        rowKey={String}
        columns={[
          { key: "x", head: props.xName ?? "Time", cell: (row) => (props.x === "time" ? at(xs[row]!) : xs[row]!) },
          ...props.lines.map((line, i) => ({
            key: line.key,
            head: line.name,
            number: true,
            cell: (row: number) => {
              const y = props.data[i + 1]?.[row];
              return y === null || y === undefined ? "–" : props.format(y);
            },
          })),
        ]}
      />
    </div>
  );
}

/** What happened in the time a chart shows: for everybody what the shapes in it mean. */
export function MarkList({ marks }: { marks: Mark[] }) {
  if (marks.length === 0) return null;
  const newest = [...marks].sort((a, b) => b.at - a.at).slice(0, 8);
  return (
    <ol className="marks" aria-label="What happened">
      {newest.map((mark, i) => (
        <li key={`${mark.at}${mark.kind}${i}`}>
          <span className={`mark-shape ${mark.kind}`} aria-hidden="true">
            {MARK_SHAPE[mark.kind] ?? "·"}
          </span>
          <time dateTime={new Date(mark.at * 1000).toISOString()} title={atFull(mark.at)}>
            {at(mark.at)}
          </time>
          <span>
            {mark.kind}
            {mark.version && (
              <>
                {" "}
                <a href={`#/versions/${mark.version}`}>
                  <code>{mark.version}</code>
                </a>
              </>
            )}
            {mark.tag && ` for ${tagName(mark.tag)}`}
            {mark.text && <span className="muted"> {mark.text}</span>}
          </span>
        </li>
      ))}
    </ol>
  );
}
