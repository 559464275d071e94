// capture and consent counters -> what is kept, of whom, why the rest is not; and how to delete it.
import { useState } from "react";
import type { Capture, CaptureCounters } from "../api.ts";
import { at, bytes, count, duration, percent } from "../format.ts";
import { useResource } from "../live.tsx";
import { deleteRequest, deleteTenant } from "../parts/actions.tsx";
import { useAsk } from "../parts/confirm.tsx";
import { Ago, Badge, Bar, Button, Empty, Facts, Failure, Panel, Table, Text, VersionLink, Waiting } from "../parts/ui.tsx";

export function CapturePage() {
  const { data, error, reload } = useResource<Capture>("capture", ["capture"]);
  return (
    <>
      <h1>Capture and privacy</h1>
      {error && <Failure error={error} retry={reload} />}
      {data ? <Body capture={data} /> : !error && <Waiting />}
    </>
  );
}

const OUTCOMES: [keyof CaptureCounters, string, string][] = [
  ["num_kept", "kept", "operator, tenant and client agreed"],
  ["num_opted_out", "opted out", '"store": false'],
  ["num_no_consent", "no consent", "tenant or operator did not agree, or nobody said so"],
  ["num_dropped", "dropped", "no room in the queue, or storage does not answer"],
];

function Body({ capture }: { capture: Capture }) {
  const { counters } = capture;
  return (
    <>
      {!capture.enabled && (
        <div className="notice warn">
          <div>
            <strong>Nothing is captured.</strong> {capture.reason || "Learning is off."} Turn it on with <code>--set learning.enabled=true</code>.
          </div>
        </div>
      )}
      {capture.enabled && capture.reason && (
        <div className="notice bad" role="alert">
          <strong>{capture.reason}</strong>
        </div>
      )}
      <div className="grid two">
        <Panel title="Consent" hint={`${count(counters.num_seen)} requests since control started.`}>
          {counters.num_seen ? <Outcomes counters={counters} /> : <Empty title="No request was seen yet." />}
        </Panel>
        <Panel title="Kept now" hint={capture.storage}>
          <Bar label="Storage" share={capture.num_bytes / Math.max(1, capture.max_bytes)} text={`${bytes(capture.num_bytes)} of ${bytes(capture.max_bytes)}`} />
          <Facts
            items={[
              ["Storage", `${bytes(capture.num_bytes)} of ${bytes(capture.max_bytes)}`],
              ["Requests", `${count(capture.num_requests)}, ${count(capture.num_held_out)} held out for the gate`],
              ["Tokens", count(capture.num_tokens)],
              ["From", capture.oldest ? `${at(capture.oldest)} to ${at(capture.newest)}` : "–"],
              ["Deleted after", duration(capture.ttl_s)],
              ["Expired so far", count(counters.num_expired)],
              ["Redaction", capture.redact === "none" ? "none" : `${capture.redact}, ${count(counters.num_redacted)} requests`],
            ]}
          />
        </Panel>
        <Panel title="By tenant" className="wide-panel" hint="Names of API keys. Texts are never shown here.">
          <Tenants capture={capture} />
        </Panel>
        <Panel title="Delete one request" hint="The id is in the answer's body and its X-Request-Id header.">
          <OneRequest />
        </Panel>
        <Panel title="Deletions" className="wide-panel">
          {capture.deletions.length ? (
            <Table
              label="Deletions"
              rows={capture.deletions}
              rowKey={(row) => row.id}
              columns={[
                { key: "at", head: "When", cell: (row) => <Ago time={row.at} /> },
                { key: "what", head: "What", cell: (row) => <code>{row.what}</code> },
                { key: "who", head: "By", cell: (row) => row.who },
                { key: "state", head: "State", cell: (row) => <Badge tone={row.state === "done" ? "good" : row.state === "failed" ? "bad" : "info"}>{row.state}</Badge> },
                { key: "n", head: "Requests", number: true, cell: (row) => count(row.num_requests) },
                {
                  key: "versions",
                  head: "Had learned from it",
                  cell: (row) => (row.versions.length ? row.versions.map((version) => <VersionLink key={version} version={version} />) : "none"),
                },
              ]}
            />
          ) : (
            <Empty title="Nothing was deleted by hand." />
          )}
        </Panel>
      </div>
    </>
  );
}

function Outcomes({ counters }: { counters: CaptureCounters }) {
  const total = Math.max(1, ...[OUTCOMES.reduce((sum, [key]) => sum + counters[key], 0)]);
  return (
    <>
      {OUTCOMES.map(([key, name, why]) => (
        <div className="trigger" key={key}>
          <p>
            <span>
              {name} <span className="muted">{why}</span>
            </span>
            <span className="trigger-numbers">
              <strong>{count(counters[key])}</strong> {percent(counters[key] / total, 0)}
            </span>
          </p>
          <Bar label={name} share={counters[key] / total} tone={key === "num_kept" ? "good" : key === "num_dropped" ? "warn" : "info"} text={`${counters[key]} requests`} />
        </div>
      ))}
    </>
  );
}

function Tenants({ capture }: { capture: Capture }) {
  const ask = useAsk();
  if (capture.tenants.length === 0) return <Empty title="Nothing is kept of anybody." />;
  return (
    <Table
      label="By tenant"
      rows={capture.tenants}
      rowKey={(row) => row.tenant}
      columns={[
        { key: "tenant", head: "Tenant", cell: (row) => <strong>{row.tenant || "without a key"}</strong> },
        { key: "default", head: "If a request says nothing", cell: (row) => (row.default_consent ? "kept" : "not kept") },
        { key: "requests", head: "Requests", number: true, cell: (row) => count(row.num_requests) },
        { key: "tokens", head: "Tokens", number: true, cell: (row) => count(row.num_tokens) },
        { key: "bytes", head: "Storage", number: true, cell: (row) => bytes(row.num_bytes) },
        { key: "out", head: "Opted out", number: true, cell: (row) => count(row.num_opted_out) },
        { key: "share", head: "Of the last run", number: true, cell: (row) => percent(row.share, 0) },
        {
          key: "delete",
          head: "Delete",
          cell: (row) => (
            <Button tone="danger" onClick={() => ask(deleteTenant(row.tenant))} aria-label={`Delete data of ${row.tenant || "requests without a key"}`}>
              Delete
            </Button>
          ),
        },
      ]}
    />
  );
}

function OneRequest() {
  const ask = useAsk();
  const [id, setId] = useState("");
  return (
    <form
      className="inline-form"
      onSubmit={(event) => {
        event.preventDefault();
        if (id.trim()) ask(deleteRequest(id.trim()));
      }}
    >
      <Text label="Request id" value={id} onChange={(event) => setId(event.target.value)} />
      <Button type="submit" tone="danger" disabled={!id.trim()}>
        Delete
      </Button>
    </form>
  );
}
