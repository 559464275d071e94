// the ledger -> whether learning paid: by run, in sum, and what the loop decided not to do.
import type { Ledger, LedgerDecision } from "../api.ts";
import { duration, tagName } from "../format.ts";
import { useResource } from "../live.tsx";
import { LedgerBars } from "../parts/drawings.tsx";
import { Ago, Empty, Failure, Panel, Table, Waiting } from "../parts/ui.tsx";

export function LedgerPage() {
  const { data, error, reload } = useResource<Ledger>("ledger?limit=50", ["ledger"]);
  return (
    <>
      <h1>Ledger</h1>
      {error && <Failure error={error} retry={reload} />}
      {data ? <Body ledger={data} /> : !error && <Waiting />}
    </>
  );
}

const WHAT: Record<LedgerDecision["what"], string> = { do_not_train: "do not train", do_not_speculate: "do not speculate" };

function Body({ ledger }: { ledger: Ledger }) {
  const { total } = ledger;
  const isLoss = total.net_s < 0;
  return (
    <>
      <dl className="tiles">
        <div className={`tile ${isLoss ? "bad" : "good"}`}>
          <dt>Net</dt>
          <dd>
            <span className="tile-value">
              {isLoss ? "▼" : "▲"} {duration(total.net_s)}
            </span>
            <span className="tile-sub">{total.num_runs === 0 ? "no run yet" : isLoss ? "learning has cost time so far" : "learning has saved time so far"}</span>
          </dd>
        </div>
        <div className="tile">
          <dt>Realised</dt>
          <dd>
            <span className="tile-value">{duration(total.realised_s)}</span>
            <span className="tile-sub">of decode time saved</span>
          </dd>
        </div>
        <div className="tile">
          <dt>Predicted</dt>
          <dd>
            <span className="tile-value">{duration(total.predicted_s)}</span>
            <span className="tile-sub">by the gate</span>
          </dd>
        </div>
        <div className="tile">
          <dt>Spent</dt>
          <dd>
            <span className="tile-value">{duration(total.spent_s)}</span>
            <span className="tile-sub">on {total.num_runs} runs, training and scoring</span>
          </dd>
        </div>
      </dl>
      <div className="grid">
        <Panel title="By run" hint="Seconds. Left of the line is a loss.">
          {ledger.runs.length ? <LedgerBars rows={ledger.runs} /> : <Empty title="No runs yet.">Each run is entered here, also when it did not pay.</Empty>}
        </Panel>
        <Panel title="What the loop decided not to do">
          {ledger.decisions.length ? (
            <Table
              label="Decisions"
              rows={ledger.decisions}
              rowKey={(row) => `${row.at}${row.what}${row.tag}`}
              columns={[
                { key: "what", head: "Decision", cell: (row) => <strong>{WHAT[row.what]}</strong> },
                { key: "tag", head: "For", cell: (row) => tagName(row.tag) },
                { key: "reason", head: "Why", cell: (row) => row.reason },
                { key: "saving", head: "Would save", number: true, cell: (row) => duration(row.expected_saving_s) },
                { key: "cost", head: "Would cost", number: true, cell: (row) => duration(row.expected_cost_s) },
                { key: "at", head: "Since", cell: (row) => <Ago time={row.at} /> },
                { key: "until", head: "Until", cell: (row) => (row.until ? <Ago time={row.until} /> : "it still holds") },
              ]}
            />
          ) : (
            <Empty title="Nothing was decided against." />
          )}
        </Panel>
      </div>
    </>
  );
}
