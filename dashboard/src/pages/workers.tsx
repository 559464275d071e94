// workers, each second -> a map along the data's way: state, version, KV use, streams, resident drafts.
import type { Worker } from "../api.ts";
import { count, duration, percent } from "../format.ts";
import { useLive } from "../live.tsx";
import { Ago, Badge, Bar, Empty, LevelBadge, VersionLink, Waiting } from "../parts/ui.tsx";
import { link } from "../route.ts";

const ROLES: [Worker["role"], string][] = [
  ["gateway", "takes requests, streams text"],
  ["router", "chooses where they go"],
  ["prefill", "reads prompts, sends their KV"],
  ["decode", "verifies and emits tokens"],
  ["draft", "proposes tokens"],
  ["trainer", "teaches the draft"],
  ["control", "decides, and serves this page"],
];

export function WorkersPage() {
  const { workers } = useLive();
  return (
    <>
      <h1>Workers</h1>
      {workers === null ? <Waiting /> : workers.length === 0 ? <Empty title="No worker is registered.">Start the cluster: paceline serve</Empty> : <Map workers={workers} />}
    </>
  );
}

function Map({ workers }: { workers: Worker[] }) {
  const known = new Set(ROLES.map(([role]) => role));
  const others = workers.filter((worker) => !known.has(worker.role));
  return (
    <div className="map">
      {ROLES.map(([role, what]) => {
        const some = workers.filter((worker) => worker.role === role);
        if (some.length === 0) return null;
        return (
          <section key={role} className="role" aria-label={role} style={{ flexGrow: some.length, flexBasis: `${Math.min(some.length, 4) * 280}px` }}>
            <h2>
              {role} <span className="muted">{what}</span>
            </h2>
            <div className="cards">
              {some.map((worker) => (
                <Card key={worker.id} worker={worker} />
              ))}
            </div>
          </section>
        );
      })}
      {others.length > 0 && (
        <div className="cards">
          {others.map((worker) => (
            <Card key={worker.id} worker={worker} />
          ))}
        </div>
      )}
    </div>
  );
}

function Card({ worker }: { worker: Worker }) {
  const blocks = worker.kv_blocks_used + worker.kv_blocks_free;
  const share = blocks ? worker.kv_blocks_used / blocks : 0;
  const isReady = worker.state === "ready";
  return (
    <article className={`card ${isReady ? "" : "not-ready"}`} aria-label={`${worker.role} ${worker.id}`}>
      <header>
        <h3>{worker.id}</h3>
        <Badge tone={isReady ? "good" : worker.state === "lost" ? "bad" : "warn"}>{worker.state}</Badge>
      </header>
      {blocks > 0 && (
        <>
          <p className="split">
            <span>KV blocks</span>
            <span>
              {count(worker.kv_blocks_used)} of {count(blocks)} ({percent(share, 0)})
            </span>
          </p>
          <Bar
            label={`KV use of ${worker.id}`}
            share={share}
            tone={share > 0.9 ? "bad" : share > 0.75 ? "warn" : "info"}
            text={`${worker.kv_blocks_used} of ${blocks} blocks`}
          />
        </>
      )}
      {(worker.num_streams > 0 || worker.role === "decode" || worker.role === "gateway") && (
        <p className="split">
          <span>Streams</span>
          <strong>{count(worker.num_streams)}</strong>
        </p>
      )}
      {worker.draft && <DraftPart worker={worker} />}
      {worker.trainer && (
        <p className="split">
          <span>
            {worker.trainer.state} {worker.trainer.run_id && <a href={link("training", worker.trainer.run_id)}>{worker.trainer.run_id}</a>}
          </span>
          <LevelBadge level={worker.trainer.level} />
        </p>
      )}
      <p className="muted small">
        {worker.version && <code>{worker.version}</code>} {worker.node} pid {worker.pid}, seen <Ago time={worker.seen} />
      </p>
    </article>
  );
}

function DraftPart({ worker }: { worker: Worker }) {
  const draft = worker.draft!;
  return (
    <>
      <ul className="resident" aria-label="Versions in memory">
        {draft.resident.map((version) => (
          <li key={version}>
            <VersionLink version={version} />{" "}
            <span className="muted">{version === draft.live ? "live" : version === draft.canary ? "canary" : "kept"}</span>
          </li>
        ))}
      </ul>
      <p className="split">
        <span>{draft.is_current ? "Follows the plan" : "Takes up a new plan"}</span>
        <span>last swap {duration(draft.swap_ms / 1000) === "0 s" ? "–" : `${draft.swap_ms.toFixed(1)} ms`}</span>
      </p>
      {draft.refused.map((one) => (
        <p key={one.version} className="notice warn small">
          Refused {one.version}: {one.reason}
        </p>
      ))}
    </>
  );
}
