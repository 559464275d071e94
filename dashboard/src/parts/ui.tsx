// the small parts every page is made of.
import { type ComponentProps, type ReactNode, useEffect, useId, useState } from "react";
import type { GuardLevel, RunState, VersionState } from "../api.ts";
import type { Refused } from "../client.ts";
import { ago, at, atFull } from "../format.ts";
import { useNow } from "../live.tsx";
import { LEVEL_TONE, RUN_TONE, STATE_TONE, type Tone, versionLook } from "../look.ts";
import { link } from "../route.ts";
import { words } from "../format.ts";

export function Panel(props: {
  title: string;
  hint?: string;
  actions?: ReactNode;
  className?: string;
  children: ReactNode;
}) {
  const id = useId();
  return (
    <section className={`panel ${props.className ?? ""}`} aria-labelledby={id}>
      <header className="panel-head">
        <div>
          <h2 id={id}>{props.title}</h2>
          {props.hint && <p className="hint">{props.hint}</p>}
        </div>
        {props.actions && <div className="panel-actions">{props.actions}</div>}
      </header>
      {props.children}
    </section>
  );
}

const GLYPH: Record<Tone, string> = { good: "✓", warn: "!", bad: "✕", info: "›", plain: "·" };

/** A state in a word: its glyph says as much as its colour. */
export function Badge({ tone, children }: { tone: Tone; children: ReactNode }) {
  return (
    <span className={`badge ${tone}`}>
      <span aria-hidden="true">{GLYPH[tone]}</span> {children}
    </span>
  );
}

export const StateBadge = ({ state }: { state: VersionState }) => <Badge tone={STATE_TONE[state] ?? "plain"}>{words(state)}</Badge>;
export const RunBadge = ({ state }: { state: RunState }) => <Badge tone={RUN_TONE[state] ?? "plain"}>{words(state)}</Badge>;
export const LevelBadge = ({ level }: { level: GuardLevel }) => <Badge tone={LEVEL_TONE[level] ?? "plain"}>{level}</Badge>;

export function Button({ tone, className, ...props }: ComponentProps<"button"> & { tone?: "primary" | "danger" | "quiet" }) {
  return <button type="button" {...props} className={`button ${tone ?? ""} ${className ?? ""}`} />;
}

/** A version's id with the swatch it has in all charts. */
export function VersionLink({ version, plain }: { version: string; plain?: boolean }) {
  if (!version) return <span className="muted">none</span>;
  const look = versionLook(version);
  const swatch = (
    <svg className="swatch" width="18" height="10" aria-hidden="true">
      <line x1="1" y1="5" x2="17" y2="5" strokeWidth="3" strokeDasharray={look.dash.join(" ")} style={{ stroke: look.color }} />
    </svg>
  );
  if (plain)
    return (
      <span className="version">
        {swatch}
        <code>{version}</code>
      </span>
    );
  return (
    <a className="version" href={link("versions", version)}>
      {swatch}
      <code>{version}</code>
    </a>
  );
}

/** "4 min ago", with the exact time as its title. */
export function Ago({ time }: { time: number | null | undefined }) {
  const now = useNow();
  if (!time) return <span className="muted">–</span>;
  return (
    <time dateTime={new Date(time * 1000).toISOString()} title={atFull(time)}>
      {ago(time, now)}
    </time>
  );
}

export function At({ time }: { time: number | null | undefined }) {
  if (!time) return <span className="muted">–</span>;
  return (
    <time dateTime={new Date(time * 1000).toISOString()} title={atFull(time)}>
      {at(time)}
    </time>
  );
}

/** Nothing to show, and what to do about it. */
export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className="empty">
      <p className="empty-title">{title}</p>
      {children && <div>{children}</div>}
    </div>
  );
}

export function Failure({ error, retry }: { error: Refused; retry?: () => void }) {
  return (
    <div className="notice bad" role="alert">
      <div>
        <strong>{error.message}</strong> {error.action && <span>{error.action}</span>}
      </div>
      {retry && <Button onClick={retry}>Try again</Button>}
    </div>
  );
}

/** Waiting for the first answer; says so only when that takes long, so that quick answers do not flicker. */
export function Waiting() {
  const [isLong, setIsLong] = useState(false);
  useEffect(() => {
    const timer = window.setTimeout(() => setIsLong(true), 300);
    return () => window.clearTimeout(timer);
  }, []);
  return (
    <p className="empty muted" aria-busy="true">
      {isLong ? "Loading …" : "\u00a0"}
    </p>
  );
}

export interface Column<T> {
  key: string;
  head: string;
  /** Numbers stand to the right. */
  number?: boolean;
  /** Left out on a phone. */
  wide?: boolean;
  cell: (row: T) => ReactNode;
}

/** On a phone each row becomes a card whose fields carry their column's name. */
export function Table<T>(props: { label: string; columns: Column<T>[]; rows: T[]; rowKey: (row: T) => string }) {
  return (
    <div className="table-wrap" tabIndex={0} role="group" aria-label={props.label}>
      <table>
        <caption className="unseen">{props.label}</caption>
        <thead>
          <tr>
            {props.columns.map((column) => (
              <th key={column.key} scope="col" className={column.number ? "number" : ""}>
                {column.head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row) => (
            <tr key={props.rowKey(row)}>
              {props.columns.map((column) => (
                <td
                  key={column.key}
                  data-head={column.head}
                  className={`${column.number ? "number" : ""} ${column.wide ? "wide" : ""}`}
                >
                  <div>{column.cell(row)}</div>
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A share of something, with its value in words beside it. */
export function Bar(props: { label: string; share: number; text: string; tone?: Tone; marks?: { at: number; label: string }[] }) {
  const share = Math.max(0, Math.min(1, props.share));
  return (
    <div className="bar" role="meter" aria-label={props.label} aria-valuemin={0} aria-valuemax={1} aria-valuenow={share} aria-valuetext={props.text}>
      <div className="bar-track">
        <div className={`bar-fill ${props.tone ?? "info"}`} style={{ width: `${share * 100}%` }} />
        {props.marks?.map((mark) => (
          <i key={mark.label} className="bar-mark" title={mark.label} style={{ left: `${Math.min(100, mark.at * 100)}%` }} />
        ))}
      </div>
    </div>
  );
}

export function Facts({ items }: { items: [string, ReactNode][] }) {
  return (
    <dl className="facts">
      {items.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Choice<T extends string>(props: {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}) {
  const id = useId();
  return (
    <label className="field" htmlFor={id}>
      <span>{props.label}</span>
      <select id={id} value={props.value} onChange={(event) => props.onChange(event.target.value as T)}>
        {props.options.map(([value, name]) => (
          <option key={value} value={value}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Text({ label, ...props }: ComponentProps<"input"> & { label: string }) {
  const id = useId();
  return (
    <label className="field" htmlFor={id}>
      <span>{label}</span>
      <input id={id} autoComplete="off" spellCheck={false} {...props} />
    </label>
  );
}

/** One of a few, as buttons side by side. */
export function Segments<T extends string>(props: {
  label: string;
  value: T;
  options: readonly (readonly [T, string])[];
  onChange: (value: T) => void;
}) {
  return (
    <div className="segments" role="group" aria-label={props.label}>
      {props.options.map(([value, name]) => (
        <button key={value} type="button" aria-pressed={value === props.value} onClick={() => props.onChange(value)}>
          {name}
        </button>
      ))}
    </div>
  );
}
