// versions, states and marks -> colour, dash and shape. Nothing is told by colour alone.
import { useEffect, useState, useSyncExternalStore } from "react";
import type { GuardLevel, Mark, RunState, VersionState } from "./api.ts";

export type Tone = "good" | "warn" | "bad" | "info" | "plain";

/** Eight hues that stay apart for the common kinds of colour blindness (after Okabe and Ito); CSS has a light and a dark shade of each. */
export const NUM_HUES = 8;
const DASHES: number[][] = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

export interface Look {
  hue: number;
  /** CSS colour. */
  color: string;
  /** Of its line, in CSS pixels. */
  dash: number[];
}

export function lookOf(index: number): Look {
  const hue = index % NUM_HUES;
  return { hue, color: `var(--hue-${hue})`, dash: DASHES[index % DASHES.length]! };
}

/** A version keeps its look in this browser: looks are dealt in the order in which versions are first seen. */
const SEEN = "paceline.versions";
const MAX_SEEN = 400;
const seen = new Map<string, number>(readSeen());
function readSeen(): [string, number][] {
  try {
    const kept: unknown = JSON.parse(window.localStorage.getItem(SEEN) ?? "[]");
    return Array.isArray(kept) ? kept.filter((one) => typeof one === "string").map((version, i) => [version, i]) : [];
  } catch {
    return [];
  }
}
export function versionLook(version: string): Look {
  const known = seen.get(version);
  if (known !== undefined) return lookOf(known);
  if (seen.size >= MAX_SEEN) seen.clear();
  seen.set(version, seen.size);
  window.localStorage.setItem(SEEN, JSON.stringify([...seen.keys()]));
  return lookOf(seen.size - 1);
}

export const STATE_TONE: Record<VersionState, Tone> = {
  candidate: "plain",
  rejected: "bad",
  canary: "info",
  live: "good",
  retired: "plain",
  rolled_back: "bad",
  stale: "warn",
  revoked: "bad",
};

export const RUN_TONE: Record<RunState, Tone> = {
  pending: "plain",
  loading: "info",
  training: "info",
  scoring: "info",
  paused: "warn",
  done: "good",
  failed: "bad",
  stopped: "plain",
};

export const LEVEL_TONE: Record<GuardLevel, Tone> = { normal: "good", throttle: "warn", pause: "warn", evict: "bad" };

/** Drawn at the top of a mark's line, and in the list under the chart. */
export const MARK_SHAPE: Record<Mark["kind"], string> = {
  swap: "◆",
  canary: "◇",
  promote: "▲",
  rollback: "▼",
  drift: "≈",
  train: "●",
  gate: "■",
};

// --- theme ------------------------------------------------------------------------------------------------

export type Theme = "system" | "light" | "dark";
const KEY = "paceline.theme";
const listeners = new Set<() => void>();

export function readTheme(): Theme {
  const kept = window.localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : "system";
}

export function applyTheme(theme: Theme): void {
  window.localStorage.setItem(KEY, theme);
  document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

export function useTheme(): Theme {
  return useSyncExternalStore((callback) => {
    listeners.add(callback);
    return () => void listeners.delete(callback);
  }, readTheme);
}

/** Changes whenever the colours on screen do: a canvas has to be drawn again then. */
export function useColours(): string {
  const theme = useTheme();
  const isDark = useMedia("(prefers-color-scheme: dark)");
  return theme === "system" ? (isDark ? "dark" : "light") : theme;
}

export function useMedia(query: string): boolean {
  const [matches, setMatches] = useState(() => window.matchMedia(query).matches);
  useEffect(() => {
    const list = window.matchMedia(query);
    const update = () => setMatches(list.matches);
    update();
    list.addEventListener("change", update);
    return () => list.removeEventListener("change", update);
  }, [query]);
  return matches;
}

/** What a CSS colour is now, for a canvas: `var(--hue-1)` -> `rgb(...)`. */
export function resolved(color: string): string {
  const probe = document.createElement("span");
  probe.style.color = color;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
