// the stream of events -> the freshest overview and workers, the state of the connection, and what to load again.
import { createContext, type ReactNode, useCallback, useContext, useEffect, useMemo, useRef, useState } from "react";
import type { Changed, Events, FiguresDelta, Overview, Resource, Worker } from "./api.ts";
import { get, Refused } from "./client.ts";

type Connection = "connecting" | "open" | "lost";
type Listener = (what: ReadonlySet<Resource>) => void;
/** null: some were missed, load all. */
type FiguresListener = (delta: FiguresDelta | null) => void;

interface Live {
  overview: Overview | null;
  workers: Worker[] | null;
  connection: Connection;
  subscribe: (listener: Listener) => () => void;
  subscribeFigures: (listener: FiguresListener) => () => void;
}

const LiveContext = createContext<Live | null>(null);
const ALL: ReadonlySet<Resource> = new Set<Resource>([
  "versions",
  "runs",
  "ledger",
  "drift",
  "guard",
  "capture",
  "audit",
  "settings",
  "keys",
]);
const RETRY_MS = 2000;
/** An `overview` comes each second; a stream that is silent for this long is as good as lost. */
const SILENCE_MS = 8000;

export function LiveProvider({ onSignedOut, children }: { onSignedOut: () => void; children: ReactNode }) {
  const [overview, setOverview] = useState<Overview | null>(null);
  const [workers, setWorkers] = useState<Worker[] | null>(null);
  const [connection, setConnection] = useState<Connection>("connecting");
  const listeners = useRef(new Set<Listener>());
  const figuresListeners = useRef(new Set<FiguresListener>());

  useEffect(() => {
    let source: EventSource | null = null;
    let retry: number | undefined;
    let silence: number | undefined;
    let wasOpen = false;
    const heard = () => {
      window.clearTimeout(silence);
      silence = window.setTimeout(lost, SILENCE_MS);
    };
    const lost = () => {
      source?.close();
      window.clearTimeout(silence);
      window.clearTimeout(retry);
      setConnection("lost");
      retry = window.setTimeout(open, RETRY_MS);
      // An EventSource does not say why it failed; the session's own endpoint does.
      get("session").catch((error: unknown) => {
        if (error instanceof Refused && error.status === 401) onSignedOut();
      });
    };
    const on = <K extends keyof Events>(name: K, take: (value: Events[K]) => void) =>
      source?.addEventListener(name, (event) => {
        heard();
        take(JSON.parse((event as MessageEvent<string>).data) as Events[K]);
      });
    const open = () => {
      source = new EventSource("/admin/api/events");
      heard(); // a connection that is never answered is lost as well
      source.onopen = () => {
        heard();
        setConnection("open");
        // What changed while nobody listened is not known: load all that is shown.
        if (wasOpen) {
          for (const listener of listeners.current) listener(ALL);
          for (const listener of figuresListeners.current) listener(null);
        }
        wasOpen = true;
      };
      source.onerror = lost;
      on("overview", setOverview);
      on("workers", setWorkers);
      on("changed", (changed: Changed) => {
        const what = new Set(changed.what);
        for (const listener of listeners.current) listener(what);
      });
      on("figures", (delta) => {
        for (const listener of figuresListeners.current) listener(delta);
      });
      on("signed_out", onSignedOut);
    };
    open();
    return () => {
      window.clearTimeout(retry);
      window.clearTimeout(silence);
      source?.close();
    };
  }, [onSignedOut]);

  const subscribe = useCallback((listener: Listener) => {
    listeners.current.add(listener);
    return () => void listeners.current.delete(listener);
  }, []);
  const subscribeFigures = useCallback((listener: FiguresListener) => {
    figuresListeners.current.add(listener);
    return () => void figuresListeners.current.delete(listener);
  }, []);
  const value = useMemo(
    () => ({ overview, workers, connection, subscribe, subscribeFigures }),
    [overview, workers, connection, subscribe, subscribeFigures],
  );
  return <LiveContext value={value}>{children}</LiveContext>;
}

export function useLive(): Live {
  const live = useContext(LiveContext);
  if (!live) throw new Error("useLive outside of LiveProvider");
  return live;
}

/** Seconds since 1970 by control's clock, as of the last event. */
export function useNow(): number {
  return useLive().overview?.at ?? Date.now() / 1000;
}

/** Calls back when one of `resources` changed on the server. */
export function useChanged(resources: readonly Resource[], callback: () => void): void {
  const { subscribe } = useLive();
  const latest = useRef(callback);
  latest.current = callback;
  const names = resources.join();
  useEffect(
    () => subscribe((what) => names.split(",").some((name) => what.has(name as Resource)) && latest.current()),
    [subscribe, names],
  );
}

export interface Loaded<T> {
  data: T | null;
  error: Refused | null;
  reload: () => void;
}

/** GET `path` now and whenever one of `resources` changes. What was loaded stays until the next answer is there. */
export function useResource<T>(path: string | null, resources: readonly Resource[] = []): Loaded<T> {
  const [state, setState] = useState<{ path: string | null; data: T | null; error: Refused | null }>({
    path: null,
    data: null,
    error: null,
  });
  const running = useRef<{ again: boolean } | null>(null);
  const load = useCallback(() => {
    if (path === null) return;
    if (running.current) {
      running.current.again = true; // one at a time, and never an older answer over a newer one
      return;
    }
    const mine = { again: false };
    running.current = mine;
    get<T>(path)
      .then(
        (data) => running.current === mine && setState({ path, data, error: null }),
        (error: unknown) => {
          if (running.current !== mine) return;
          const refused = error instanceof Refused ? error : new Refused(0, String(error));
          setState((old) => ({ path, data: old.path === path ? old.data : null, error: refused }));
        },
      )
      .finally(() => {
        if (running.current !== mine) return;
        running.current = null;
        if (mine.again) load();
      });
  }, [path]);
  useEffect(() => {
    load();
    return () => {
      running.current = null;
    };
  }, [load]);
  useChanged(resources, load);
  const isCurrent = state.path === path;
  return { data: isCurrent ? state.data : null, error: isCurrent ? state.error : null, reload: load };
}
