// gate reports, ledger rows, depths and lineage -> drawings in SVG, each with its numbers as text.
import { useEffect, useRef } from "react";
import type { DepthRow, GateReport, Interval, LedgerRow, LineageNode } from "../api.ts";
import { change, duration, percent, words } from "../format.ts";
import { STATE_TONE, versionLook } from "../look.ts";
import { link } from "../route.ts";

// --- intervals of the gate --------------------------------------------------------------------------------

const interval = (value: Interval): string => `${change(value.mean)} [${change(value.lo)}, ${change(value.hi)}]`;

interface IntervalRow {
  name: string;
  requests: number;
  saving: Interval;
  passed: boolean;
  limit: number;
}

/** One row by domain: point and 95 % interval on a common scale, with zero and the limit that row must keep. */
export function Intervals({ report }: { report: GateReport }) {
  const rows: IntervalRow[] = [
    { name: "overall", requests: report.num_requests, saving: report.saving, passed: report.saving.lo > report.min_saving, limit: report.min_saving },
    ...report.domains.map((domain) => ({
      name: domain.domain || "no domain",
      requests: domain.num_requests,
      saving: domain.saving,
      passed: domain.passed,
      limit: report.domain_floor,
    })),
  ];
  const ends = rows.flatMap((row) => [row.saving.lo, row.saving.hi, row.limit, 0]);
  const lo = Math.min(...ends);
  const hi = Math.max(...ends);
  const room = Math.max((hi - lo) * 0.08, 0.005);
  const at = (value: number) => `${(100 * (value - lo + room)) / (hi - lo + 2 * room)}%`;
  return (
    <div className="intervals" role="table" aria-label="Saving of decode time at the gate">
      {rows.map((row) => (
        <div key={row.name} className="interval-row" role="row">
          <span role="rowheader" className="interval-name">
            {row.name}
            <small>{row.requests} requests</small>
          </span>
          <svg role="cell" aria-label={interval(row.saving)} height="28" width="100%">
            <line className="zero" x1={at(0)} x2={at(0)} y1="0" y2="28" />
            <line className="limit" x1={at(row.limit)} x2={at(row.limit)} y1="2" y2="26">
              <title>{`must be above ${change(row.limit)}`}</title>
            </line>
            <line className={`span ${row.passed ? "good" : "bad"}`} x1={at(row.saving.lo)} x2={at(row.saving.hi)} y1="14" y2="14" />
            <line className={`span-end ${row.passed ? "good" : "bad"}`} x1={at(row.saving.lo)} x2={at(row.saving.lo)} y1="8" y2="20" />
            <line className={`span-end ${row.passed ? "good" : "bad"}`} x1={at(row.saving.hi)} x2={at(row.saving.hi)} y1="8" y2="20" />
            <circle className={row.passed ? "good" : "bad"} cx={at(row.saving.mean)} cy="14" r="5" />
          </svg>
          <span role="cell" className="interval-text">
            <strong>
              {row.passed ? "✓" : "✕"} {change(row.saving.mean)}
            </strong>
            <small>
              {change(row.saving.lo)} to {change(row.saving.hi)}
            </small>
          </span>
        </div>
      ))}
      <p className="hint">
        Dot and bar: saved decode time with its 95 % interval. Thin line: zero. Dashed line: what must be kept, {change(report.min_saving)} overall
        and {change(report.domain_floor)} in a domain.
      </p>
    </div>
  );
}

// --- ledger -----------------------------------------------------------------------------------------------

/** Per run: what was promised, what came, what it cost; to the left of zero is a loss. */
export function LedgerBars({ rows }: { rows: LedgerRow[] }) {
  const values = rows.flatMap((row) => [row.predicted_s ?? 0, row.realised_s ?? 0, row.spent_s]);
  const lo = Math.min(0, ...values);
  const hi = Math.max(1e-9, ...values);
  const at = (value: number) => (100 * (value - lo)) / (hi - lo);
  const bar = (name: string, value: number | null) => {
    const from = Math.min(at(0), at(value ?? 0));
    const width = Math.abs(at(value ?? 0) - at(0));
    return (
      <div className="ledger-bar" key={name}>
        <span className="ledger-kind">{name}</span>
        <svg height="14" width="100%" aria-hidden="true">
          <line className="zero" x1={`${at(0)}%`} x2={`${at(0)}%`} y1="0" y2="14" />
          <rect className={`ledger-${name} ${(value ?? 0) < 0 ? "loss" : ""}`} x={`${from}%`} width={`${Math.max(width, value ? 0.4 : 0)}%`} y="1" height="12" rx="2" />
        </svg>
        <span className="ledger-value">{value === null ? "not known" : duration(value)}</span>
      </div>
    );
  };
  return (
    <ul className="ledger-rows" aria-label="Predicted, realised and spent seconds by run">
      {rows.map((row) => (
        <li key={row.run_id}>
          <div className="ledger-head">
            <a href={link("training", row.run_id)}>
              <code>{row.run_id}</code>
            </a>
            {row.version && (
              <a href={link("versions", row.version)}>
                <code>{row.version}</code>
              </a>
            )}
            <span className="muted">{row.still_serving ? "still serving" : ""}</span>
            <Net row={row} />
          </div>
          {bar("predicted", row.predicted_s)}
          {bar("realised", row.realised_s)}
          {bar("spent", row.spent_s)}
        </li>
      ))}
    </ul>
  );
}

function Net({ row }: { row: LedgerRow }) {
  if (row.realised_s === null) return <span className="net muted">net not known yet</span>;
  const net = row.realised_s - row.spent_s;
  return (
    <span className={`net ${net < 0 ? "bad" : "good"}`}>
      {net < 0 ? "▼ lost" : "▲ saved"} {duration(Math.abs(net))} net
    </span>
  );
}

// --- acceptance by depth ----------------------------------------------------------------------------------

const MIN_TESTED = 20;

export function Depths({ groups }: { groups: { version: string; rows: DepthRow[] }[] }) {
  const depths = [...new Set(groups.flatMap((group) => group.rows.map((row) => row.depth)))].sort((a, b) => a - b).slice(0, 10);
  return (
    <div className="table-scroll" tabIndex={0} role="group" aria-label="Acceptance by depth">
    <table className="depths">
      <caption className="unseen">Acceptance by depth</caption>
      <thead>
        <tr>
          <th scope="col">Depth</th>
          {groups.map((group) => (
            <th key={group.version} scope="col">
              <code>{group.version || "no draft"}</code>
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {depths.map((depth) => (
          <tr key={depth}>
            <th scope="row">{depth}</th>
            {groups.map((group) => {
              const row = group.rows.find((one) => one.depth === depth);
              const share = row && row.num_tested > 0 ? row.num_accepted / row.num_tested : null;
              return (
                <td key={group.version}>
                  {share === null || !row ? (
                    <span className="muted">–</span>
                  ) : (
                    <span className="depth" title={`${row.num_accepted} of ${row.num_tested}`}>
                      <span className="depth-track">
                        <i style={{ width: `${share * 100}%`, background: versionLook(group.version).color }} />
                      </span>
                      {percent(share, 0)}
                      {row.num_tested < MIN_TESTED && <span className="muted"> few</span>}
                    </span>
                  )}
                </td>
              );
            })}
          </tr>
        ))}
      </tbody>
    </table>
    </div>
  );
}

// --- lineage ----------------------------------------------------------------------------------------------

const COLUMN = 212;
const ROW = 84;
const BOX = { width: 176, height: 62 };

/** Time runs to the right; a child stands right of its parent, siblings below each other. */
function placed(nodes: LineageNode[]): Map<string, { x: number; y: number; node: LineageNode }> {
  const children = new Map<string, LineageNode[]>();
  const known = new Set(nodes.map((node) => node.version));
  for (const node of nodes) {
    const parent = known.has(node.parent) ? node.parent : "";
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const places = new Map<string, { x: number; y: number; node: LineageNode }>();
  let row = 0;
  const visit = (node: LineageNode, depth: number) => {
    places.set(node.version, { x: depth, y: row, node });
    // The branch that goes on furthest keeps the row of its parent.
    const below = [...(children.get(node.version) ?? [])].sort((a, b) => size(b) - size(a) || a.created - b.created);
    below.forEach((child, i) => {
      if (i > 0) row += 1;
      visit(child, depth + 1);
    });
  };
  const size = (node: LineageNode): number => 1 + (children.get(node.version) ?? []).reduce((sum, child) => sum + size(child), 0);
  (children.get("") ?? []).forEach((root, i) => {
    if (i > 0) row += 1;
    visit(root, 0);
  });
  return places;
}

export function LineageGraph({ nodes }: { nodes: LineageNode[] }) {
  const places = placed(nodes);
  const all = [...places.values()];
  const width = (Math.max(...all.map((place) => place.x)) + 1) * COLUMN;
  const height = (Math.max(...all.map((place) => place.y)) + 1) * ROW;
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const live = all.find(({ node }) => node.state === "live" && node.tag === "");
    const view = host.current;
    if (!live || !view) return;
    view.scrollLeft = live.x * COLUMN + 8 + BOX.width / 2 - view.clientWidth / 2;
    view.scrollTop = live.y * ROW + 8 + BOX.height / 2 - view.clientHeight / 2;
    // Once: from then on it is the reader who scrolls.
  }, []);
  return (
    <div ref={host} className="lineage" tabIndex={0} role="group" aria-label="Lineage of versions">
      <svg width={width} height={height} role="group" aria-label={`${nodes.length} versions`}>
        {all.map(({ x, y, node }) => {
          const parent = places.get(node.parent);
          if (!parent) return null;
          const from = { x: parent.x * COLUMN + BOX.width + 8, y: parent.y * ROW + 8 + BOX.height / 2 };
          const to = { x: x * COLUMN + 8, y: y * ROW + 8 + BOX.height / 2 };
          const middle = (from.x + to.x) / 2;
          return <path key={node.version} className={`edge ${node.state}`} d={`M${from.x},${from.y} C${middle},${from.y} ${middle},${to.y} ${to.x},${to.y}`} />;
        })}
        {all.map(({ x, y, node }) => (
          <a key={node.version} href={link("versions", node.version)} className={`node ${STATE_TONE[node.state] ?? "plain"} ${node.state}`} aria-label={nodeName(node)}>
            <g transform={`translate(${x * COLUMN + 8},${y * ROW + 8})`}>
              <rect width={BOX.width} height={BOX.height} rx="8" />
              <line x1="10" y1="17" x2="28" y2="17" strokeWidth="3" strokeDasharray={versionLook(node.version).dash.join(" ")} style={{ stroke: versionLook(node.version).color }} />
              <text x="34" y="21" className="node-id">
                {node.version}
              </text>
              <text x="10" y="38" className="node-state">
                {words(node.state)}
                {node.pinned ? ", pinned" : ""}
                {node.tag ? `, ${node.tag}` : ""}
              </text>
              <text x="10" y="54" className="node-text">
                {node.saving === null ? (node.parent ? "not scored" : node.run_id || "shipped") : `gate ${change(node.saving)}`}
              </text>
            </g>
          </a>
        ))}
      </svg>
    </div>
  );
}

function nodeName(node: LineageNode): string {
  const saving = node.saving === null ? "not scored" : `gate ${change(node.saving)}`;
  return `${node.version}, ${words(node.state)}, ${saving}, parent ${node.parent || "none"}`;
}
