// session and address -> the page that is shown, inside navigation, theme and connection.
import { type ReactNode, useCallback, useEffect, useRef, useState } from "react";
import type { Session } from "./api.ts";
import { get, Refused, remove, setSession, whenSignedOut } from "./client.ts";
import { atClock } from "./format.ts";
import { LiveProvider, useLive } from "./live.tsx";
import { applyTheme, type Theme, useTheme } from "./look.ts";
import { AuditPage } from "./pages/audit.tsx";
import { CapturePage } from "./pages/capture.tsx";
import { DriftPage } from "./pages/drift.tsx";
import { KeysPage } from "./pages/keys.tsx";
import { LedgerPage } from "./pages/ledger.tsx";
import { OverviewPage } from "./pages/overview.tsx";
import { SettingsPage } from "./pages/settings.tsx";
import { SignInPage } from "./pages/signin.tsx";
import { TrainingPage } from "./pages/training.tsx";
import { VersionsPage } from "./pages/versions.tsx";
import { WorkersPage } from "./pages/workers.tsx";
import { Confirm } from "./parts/confirm.tsx";
import { Button, Empty } from "./parts/ui.tsx";
import { link, usePlace } from "./route.ts";

const PAGES: { page: string; name: string; icon: string; show: (id: string) => ReactNode }[] = [
  { page: "overview", name: "Overview", icon: "M3 13h4l3-8 4 14 3-6h4", show: () => <OverviewPage /> },
  { page: "versions", name: "Versions", icon: "M6 3v18M6 8c0 5 12 2 12 8v3M18 3v5", show: (id) => <VersionsPage version={id} /> },
  { page: "training", name: "Training", icon: "M3 5c3 9 8 13 18 14M3 5v16h18", show: (id) => <TrainingPage run={id} /> },
  { page: "ledger", name: "Ledger", icon: "M4 20V10M10 20V4M16 20v-7M21 20H3", show: () => <LedgerPage /> },
  { page: "drift", name: "Drift and guard", icon: "M12 3l8 3v6c0 5-4 8-8 9-4-1-8-4-8-9V6z", show: () => <DriftPage /> },
  { page: "workers", name: "Workers", icon: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z", show: () => <WorkersPage /> },
  { page: "capture", name: "Capture and privacy", icon: "M6 11V8a6 6 0 0 1 12 0v3M4 11h16v10H4z", show: () => <CapturePage /> },
  { page: "keys", name: "API keys", icon: "M15 9a4 4 0 1 1-4 4M11 13L3 21M6 18l2 2M8 16l2 2", show: () => <KeysPage /> },
  { page: "audit", name: "Audit", icon: "M5 4h14v16H5zM9 9h6M9 13h6M9 17h3", show: () => <AuditPage /> },
  { page: "settings", name: "Settings", icon: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4", show: () => <SettingsPage /> },
];

/** Whether there may be a session: a browser that never had one need not ask. */
const SIGNED_IN = "paceline.signed_in";
const TOUCH_MS = 5 * 60_000;

export function App() {
  const [session, setKnown] = useState<Session | null>(null);
  const [state, setState] = useState<"asking" | "out" | "in" | "failed">("asking");
  const take = useCallback((given: Session | null) => {
    setSession(given);
    setKnown(given);
    if (given) window.localStorage.setItem(SIGNED_IN, "1");
    else window.localStorage.removeItem(SIGNED_IN);
    setState(given ? "in" : "out");
  }, []);
  const signedOut = useCallback(() => take(null), [take]);
  const ask = useCallback(() => {
    setState("asking");
    if (!window.localStorage.getItem(SIGNED_IN)) return take(null);
    get<Session>("session").then(take, (error: unknown) => {
      if (error instanceof Refused && error.status === 401) take(null);
      else setState("failed");
    });
  }, [take]);
  useEffect(() => {
    whenSignedOut(signedOut);
    ask();
  }, [ask, signedOut]);
  useTouch(state === "in");
  if (state === "asking") return <p className="unseen">Loading …</p>;
  if (state === "failed")
    return (
      <main className="signin">
        <Empty title="Control does not answer.">
          <p>
            Check that the cluster runs: <code>paceline status</code>
          </p>
          <Button tone="primary" onClick={ask}>
            Try again
          </Button>
        </Empty>
      </main>
    );
  if (!session) return <SignInPage onSignedIn={take} />;
  return (
    <LiveProvider onSignedOut={signedOut}>
      <Confirm>
        <Shell session={session} onSignOut={() => void remove("session").catch(() => {}).then(signedOut)} />
      </Confirm>
    </LiveProvider>
  );
}

/** Somebody who uses the page stays signed in: a stream of events alone does not count as use. */
function useTouch(isOn: boolean): void {
  useEffect(() => {
    if (!isOn) return;
    let last = Date.now();
    const touch = () => {
      if (Date.now() - last < TOUCH_MS) return;
      last = Date.now();
      get("session").catch(() => {});
    };
    const events = ["pointerdown", "keydown", "wheel"] as const;
    for (const name of events) window.addEventListener(name, touch, { passive: true });
    return () => {
      for (const name of events) window.removeEventListener(name, touch);
    };
  }, [isOn]);
}

function Shell({ session, onSignOut }: { session: Session; onSignOut: () => void }) {
  const place = usePlace();
  const [isOpen, setIsOpen] = useState(false);
  const main = useRef<HTMLElement>(null);
  const page = PAGES.find((one) => one.page === place.page);
  const where = `${place.page}/${place.id}`;
  const first = useRef(where);
  useEffect(() => {
    setIsOpen(false);
    document.title = `${place.id || page?.name || "Not found"} · Paceline`;
    if (first.current !== where) {
      window.scrollTo(0, 0);
      main.current?.focus({ preventScroll: true });
    }
    first.current = where;
  }, [where]);
  return (
    <div className="shell">
      <a
        className="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          main.current?.focus();
        }}
      >
        Skip to content
      </a>
      <header className="top">
        <a className="brand" href={link("overview")}>
          <img src={`${import.meta.env.BASE_URL}favicon.svg`} width="26" height="26" alt="" />
          <span>Paceline</span>
        </a>
        <Status />
        <Button className="menu" tone="quiet" aria-expanded={isOpen} aria-controls="nav" onClick={() => setIsOpen(!isOpen)}>
          {isOpen ? "Close" : "Menu"}
        </Button>
      </header>
      <aside className={`side ${isOpen ? "open" : ""}`} id="nav" aria-label="Menu">
        <nav aria-label="Pages">
          <ul>
            {PAGES.map((one) => (
              <li key={one.page}>
                <a href={link(one.page)} aria-current={one.page === place.page ? "page" : undefined} onClick={() => setIsOpen(false)}>
                  <svg viewBox="0 0 24 24" width="18" height="18" aria-hidden="true">
                    <path d={one.icon} />
                  </svg>
                  {one.name}
                </a>
              </li>
            ))}
          </ul>
        </nav>
        <div className="side-foot">
          <ThemeChoice />
          <p className="muted">
            {session.model}
            <br />
            signed in as {session.who}
          </p>
          <Button onClick={onSignOut}>Sign out</Button>
          <p className="muted small">Paceline {session.build}</p>
        </div>
      </aside>
      <main ref={main} id="main" tabIndex={-1}>
        <Lost />
        {page ? (
          page.show(place.id)
        ) : (
          <Empty title="There is no such page.">
            <a href={link("overview")}>To the overview</a>
          </Empty>
        )}
      </main>
    </div>
  );
}

/** Whether figures are live, in the corner of every page. */
function Status() {
  const { connection, overview } = useLive();
  const text = connection === "open" ? "Live" : connection === "lost" ? "Connection lost" : "Connecting";
  return (
    <p className={`status ${connection}`} role="status">
      <i aria-hidden="true" />
      <span>{text}</span>
      {overview && <span className="muted"> {atClock(overview.at)}</span>}
    </p>
  );
}

function Lost() {
  const { connection, overview } = useLive();
  if (connection !== "lost") return null;
  return (
    <div className="notice warn" role="alert">
      <strong>No connection to control.</strong> Trying again every two seconds. Serving does not depend on it.
      {overview && ` What you see is of ${atClock(overview.at)}.`}
    </div>
  );
}

function ThemeChoice() {
  const theme = useTheme();
  return (
    <div className="segments" role="group" aria-label="Colours">
      {(["system", "light", "dark"] as Theme[]).map((one) => (
        <button key={one} type="button" aria-pressed={one === theme} onClick={() => applyTheme(one)}>
          {one === "system" ? "Auto" : one === "light" ? "Light" : "Dark"}
        </button>
      ))}
    </div>
  );
}
