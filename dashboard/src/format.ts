// numbers and times -> short text, the same everywhere. A missing value is a dash, never 0.
const NONE = "–";

const number = (digits: number) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const formats = [0, 1, 2, 3, 4].map(number);
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function fixed(value: number | null | undefined, digits = 0): string {
  return value === null || value === undefined || Number.isNaN(value) ? NONE : formats[digits]!.format(value).replace("-", "−");
}

/** 12,345 below a hundred thousand, then 123.4K. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  return value < 100_000 ? fixed(value) : compact.format(value);
}

/** 0.624 -> 62.4 % */
export function percent(value: number | null | undefined, digits = 1): string {
  return value === null || value === undefined ? NONE : `${fixed(value * 100, digits)} %`;
}

/** 0.041 -> +4.1 % */
export function change(value: number | null | undefined, digits = 1): string {
  return value === null || value === undefined ? NONE : `${value > 0 ? "+" : ""}${percent(value, digits)}`;
}

/** 75 -> 1 min 15 s; -3.2 -> −3.2 s */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 10) return `${fixed(seconds, seconds === Math.round(seconds) ? 0 : 1)} s`;
  if (seconds < 60) return `${fixed(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = Math.round(seconds % 60);
  if (minutes < 60) return rest && minutes < 10 ? `${minutes} min ${rest} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  let rest = value;
  while (rest >= 1000 && unit < units.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  return `${fixed(rest, unit === 0 || rest >= 100 ? 0 : 1)} ${units[unit]}`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

export const atClock = (at: number): string => clock.format(at * 1000);
export const atFull = (at: number): string => full.format(at * 1000);

/** The time of day today, else with the date. */
export function at(time: number | null | undefined): string {
  if (!time) return NONE;
  return new Date(time * 1000).toDateString() === new Date().toDateString() ? clock.format(time * 1000) : day.format(time * 1000);
}

/** "4 min ago" */
export function ago(time: number | null | undefined, now: number): string {
  if (!time) return NONE;
  const seconds = now - time;
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 172_800 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86_400)} d ago`;
}

/** "tenant:acme" -> "tenant acme"; "" -> "everything" */
export const tagName = (tag: string): string => (tag ? tag.replace(":", " ") : "everything");
/** "" -> "no domain" */
export const domainName = (domain: string): string => domain || "no domain";
/** "roll_back" -> "roll back" */
export const words = (text: string): string => text.replaceAll("_", " ");
