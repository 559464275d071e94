// the audit trail -> who did what, when and from where; with filters.
import type { AuditRow } from "../api.ts";
import { words } from "../format.ts";
import { More, usePages } from "../parts/pages.tsx";
import { At, Badge, Button, Choice, Empty, Failure, Panel, Table, Text, Waiting } from "../parts/ui.tsx";
import { useFilters } from "../route.ts";

const ACTIONS = [
  "sign_in",
  "sign_in_failed",
  "sign_out",
  "settings",
  "train",
  "forget",
  "pause",
  "resume",
  "canary",
  "promote",
  "pin",
  "unpin",
  "roll_back",
  "revoke",
  "delete",
  "key_create",
  "key_change",
  "key_revoke",
];

export function AuditPage() {
  const [read, write] = useFilters();
  const params = { who: read("who"), action: read("action"), q: read("q"), limit: 50 };
  const list = usePages<AuditRow>("audit", params, ["audit"]);
  const isFiltered = Boolean(params.who || params.action || params.q);
  return (
    <>
      <h1>Audit</h1>
      <Panel title="Who did what" hint="Rows are never changed and never deleted.">
        <div className="filters">
          <Choice
            label="Action"
            value={params.action}
            options={[["", "any"], ...ACTIONS.map((one) => [one, words(one)] as const)]}
            onChange={(value) => write({ action: value })}
          />
          <Text label="Who" value={params.who} onChange={(event) => write({ who: event.target.value })} />
          <Text label="Search" type="search" value={params.q} onChange={(event) => write({ q: event.target.value })} />
          {isFiltered && <Button onClick={() => write({ who: "", action: "", q: "" })}>Clear</Button>}
        </div>
        {list.error && <Failure error={list.error} retry={list.reload} />}
        {list.items === null ? (
          !list.error && <Waiting />
        ) : list.items.length === 0 ? (
          <Empty title={isFiltered ? "No row fits the filter." : "Nothing was done yet."} />
        ) : (
          <>
            <Table
              label="Audit"
              rows={list.items}
              rowKey={(row) => String(row.id)}
              columns={[
                { key: "at", head: "When", cell: (row) => <At time={row.at} /> },
                { key: "who", head: "Who", cell: (row) => row.who },
                { key: "action", head: "Action", cell: (row) => <strong>{words(row.action)}</strong> },
                { key: "subject", head: "What", cell: (row) => (row.subject ? <code>{row.subject}</code> : "–") },
                { key: "ok", head: "Outcome", cell: (row) => <Badge tone={row.ok ? "good" : "bad"}>{row.ok ? "done" : "refused"}</Badge> },
                { key: "detail", head: "Detail", cell: (row) => row.detail || "–" },
                { key: "address", head: "From", wide: true, cell: (row) => row.address || "–" },
              ]}
            />
            <More list={list} shown={list.items.length} />
          </>
        )}
      </Panel>
    </>
  );
}
