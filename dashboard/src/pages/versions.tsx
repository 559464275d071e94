// versions -> a table with filters, the lineage as a graph, and one version with its gate report and buttons.
import type { Lineage, Version, VersionDetail, VersionState } from "../api.ts";
import { bytes, change, count, duration, fixed, percent, tagName, words } from "../format.ts";
import { useLive, useResource } from "../live.tsx";
import { canary, pin, promote, revoke, rollBack, unpin } from "../parts/actions.tsx";
import { useAsk } from "../parts/confirm.tsx";
import { Intervals, LineageGraph } from "../parts/drawings.tsx";
import { More, usePages } from "../parts/pages.tsx";
import { Ago, At, Button, Choice, type Column, Empty, Facts, Failure, Panel, Segments, StateBadge, Table, Text, VersionLink, Waiting } from "../parts/ui.tsx";
import { link, useFilters } from "../route.ts";

const STATES: VersionState[] = ["candidate", "rejected", "canary", "live", "retired", "rolled_back", "stale", "revoked"];

export function VersionsPage({ version }: { version: string }) {
  if (version) return <Detail version={version} key={version} />;
  return <All />;
}

function All() {
  const [read, write] = useFilters();
  const view = read("view") === "lineage" ? "lineage" : "table";
  return (
    <>
      <div className="title-row">
        <h1>Versions</h1>
        <Segments
          label="View"
          value={view}
          options={[
            ["table", "Table"],
            ["lineage", "Lineage"],
          ]}
          onChange={(value) => write({ view: value === "table" ? "" : value })}
        />
      </div>
      {view === "table" ? <List /> : <Tree />}
    </>
  );
}

const COLUMNS: Column<Version>[] = [
  { key: "version", head: "Version", cell: (row) => <VersionLink version={row.version} /> },
  {
    key: "state",
    head: "State",
    cell: (row) => (
      <>
        <StateBadge state={row.state} />
        {row.pinned && <span className="muted"> pinned</span>}
        {row.state === "canary" && <span className="muted"> {percent(row.canary_share, 0)}</span>}
      </>
    ),
  },
  { key: "tag", head: "For", cell: (row) => tagName(row.tag) },
  { key: "gate", head: "Gate", number: true, cell: (row) => (row.gate ? `${row.gate.passed ? "✓" : "✕"} ${change(row.gate.saving.mean)}` : "–") },
  { key: "acceptance", head: "Acceptance", number: true, cell: (row) => percent(row.acceptance) },
  { key: "steps", head: "Tokens/step", number: true, cell: (row) => fixed(row.tokens_per_step, 2) },
  { key: "requests", head: "Requests", number: true, cell: (row) => count(row.num_requests) },
  { key: "created", head: "Created", cell: (row) => <Ago time={row.created} /> },
  { key: "parent", head: "Parent", wide: true, cell: (row) => (row.parent ? <VersionLink version={row.parent} /> : <span className="muted">–</span>) },
];

function List() {
  const [read, write] = useFilters();
  const params = { state: read("state"), tag: read("tag"), q: read("q"), limit: 50 };
  const list = usePages<Version>("versions", params, ["versions"]);
  const isFiltered = Boolean(params.state || params.tag || params.q);
  return (
    <Panel title="All versions">
      <div className="filters">
        <Choice
          label="State"
          value={params.state}
          options={[["", "any"], ...STATES.map((state) => [state, words(state)] as const)]}
          onChange={(value) => write({ state: value })}
        />
        <Text label="Search" type="search" value={params.q} placeholder="id, tag or reason" onChange={(event) => write({ q: event.target.value })} />
        {isFiltered && <Button onClick={() => write({ state: "", tag: "", q: "" })}>Clear</Button>}
      </div>
      {list.error && <Failure error={list.error} retry={list.reload} />}
      {list.items === null ? (
        !list.error && <Waiting />
      ) : list.items.length === 0 ? (
        isFiltered ? (
          <Empty title="No version fits the filter." />
        ) : (
          <Empty title="No versions yet.">The first appears when learning is on and a run has ended.</Empty>
        )
      ) : (
        <>
          <Table label="Versions" columns={COLUMNS} rows={list.items} rowKey={(row) => row.version} />
          <More list={list} shown={list.items.length} />
        </>
      )}
    </Panel>
  );
}

function Tree() {
  const { data, error, reload } = useResource<Lineage>("lineage", ["versions"]);
  return (
    <Panel title="Lineage" hint="Each version stands right of the one it was trained from. Choose one for its details.">
      {error && <Failure error={error} retry={reload} />}
      {data ? data.nodes.length ? <LineageGraph nodes={data.nodes} /> : <Empty title="No versions yet." /> : !error && <Waiting />}
    </Panel>
  );
}

function Detail({ version }: { version: string }) {
  const { data, error, reload } = useResource<VersionDetail>(`versions/${encodeURIComponent(version)}`, ["versions"]);
  return (
    <>
      <p className="crumbs">
        <a href={link("versions")}>Versions</a> / <a href={link("versions", "", { view: "lineage" })}>Lineage</a>
      </p>
      <div className="title-row">
        <h1>
          <VersionLink version={version} plain />
        </h1>
        {data && <Buttons version={data} />}
      </div>
      {error && <Failure error={error} retry={reload} />}
      {data ? <Facets data={data} /> : !error && <Waiting />}
    </>
  );
}

const CAN_SERVE: VersionState[] = ["candidate", "rejected", "retired", "rolled_back"];

function Buttons({ version }: { version: VersionDetail }) {
  const ask = useAsk();
  const { overview } = useLive();
  const route = overview?.routes.find((one) => one.tag === version.tag);
  const live = route?.version ?? overview?.live?.version ?? "";
  const isLive = version.state === "live";
  const isCanary = version.state === "canary";
  return (
    <div className="buttons">
      {CAN_SERVE.includes(version.state) && (
        <Button onClick={() => ask(canary(version, version.canary_share || null))}>Canary</Button>
      )}
      {(CAN_SERVE.includes(version.state) || isCanary) && (
        <Button tone="primary" onClick={() => ask(promote(version))}>
          Promote
        </Button>
      )}
      {isLive &&
        (version.pinned ? (
          <Button onClick={() => ask(unpin(version.version, version.tag))}>Unpin</Button>
        ) : (
          <Button onClick={() => ask(pin(version.version, version.tag))}>Pin</Button>
        ))}
      {(isLive || isCanary) && (
        <Button tone="danger" onClick={() => ask(rollBack(isCanary ? live : version.version, version.tag, isCanary ? version.version : ""))}>
          {isCanary ? "End canary" : "Roll back"}
        </Button>
      )}
      {version.state !== "revoked" && (
        <Button tone="danger" onClick={() => ask(revoke(version.version))}>
          Revoke
        </Button>
      )}
    </div>
  );
}

function Facets({ data }: { data: VersionDetail }) {
  const report = data.report;
  return (
    <div className="masonry">
      <Panel title="State" hint={data.reason}>
        <Facts
          items={[
            ["State", <StateBadge key="s" state={data.state} />],
            ["For", tagName(data.tag)],
            ["Parent", <VersionLink key="p" version={data.parent} />],
            [
              "Run",
              data.run_id && data.parent ? (
                <a key="r" href={link("training", data.run_id)}>
                  <code>{data.run_id}</code>
                </a>
              ) : (
                data.run_id || "–"
              ),
            ],
            ["Created", <At key="c" time={data.created} />],
            ["Acceptance", percent(data.acceptance)],
            ["Tokens per step", fixed(data.tokens_per_step, 2)],
            ["Requests served", count(data.num_requests)],
            ["Size", `${count(data.num_parameters)} parameters, ${bytes(data.num_bytes)}`],
            ["Target", <code key="t">{data.target || "–"}</code>],
            [
              "SHA-256",
              <code key="h" className="long">
                {data.sha256 || "–"}
              </code>,
            ],
            [
              "Weights",
              <code key="u" className="long">
                {data.url || (data.parent ? "removed from storage" : "of the configuration")}
              </code>,
            ],
          ]}
        />
      </Panel>
      <Panel title="Gate" hint={report ? `Against ${report.champion}, on ${count(report.num_requests)} held-out requests (${count(report.num_tokens)} tokens).` : ""}>
        {report ? (
          <>
            <p className={`verdict ${report.passed ? "good" : "bad"}`}>
              {report.passed ? "✓ Passed: " : "✕ Refused: "}
              {report.reason}
            </p>
            <Intervals report={report} />
            <Facts
              items={[
                ["Tokens per step", `${fixed(report.champion_tokens_per_step, 2)} → ${fixed(report.candidate_tokens_per_step, 2)}`],
                ["Acceptance", `${percent(report.champion_acceptance)} → ${percent(report.candidate_acceptance)}`],
                ["Draft's own time", `${fixed(report.slowdown, 3)}× (at most ${fixed(report.max_slowdown, 2)}×)`],
                ["Scored", <Ago key="a" time={report.at} />],
              ]}
            />
          </>
        ) : (
          <Empty title="Not scored.">{data.parent ? "The gate scores it when enough requests are held out." : "It was not trained here."}</Empty>
        )}
      </Panel>
      <Panel title="Learned from" hint={data.data_from && data.data_to ? `${count(data.num_shards)} ${data.num_shards === 1 ? "shard" : "shards"} over ${duration(data.data_to - data.data_from)}.` : ""}>
        {data.trained_on.length ? (
          <Table
            label="Requests by tenant"
            rows={data.trained_on}
            rowKey={(row) => row.tenant}
            columns={[
              { key: "tenant", head: "Tenant", cell: (row) => row.tenant || "without a key" },
              { key: "requests", head: "Requests", number: true, cell: (row) => count(row.num_requests) },
              { key: "tokens", head: "Tokens", number: true, cell: (row) => count(row.num_tokens) },
            ]}
          />
        ) : (
          <Empty title="No captured traffic." />
        )}
      </Panel>
      <Panel title="History">
        {data.history.length ? (
          <ol className="history">
            {[...data.history].reverse().map((entry) => (
              <li key={`${entry.at}${entry.state}`}>
                <StateBadge state={entry.state} /> <At time={entry.at} /> <span className="muted">by {entry.who}</span>
                <p>{entry.reason}</p>
              </li>
            ))}
          </ol>
        ) : (
          <Empty title="Nothing happened to it yet." />
        )}
      </Panel>
    </div>
  );
}
