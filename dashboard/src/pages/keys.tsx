// API keys -> who may use gateways or this page, and how much; made, changed and revoked here.
import { useState } from "react";
import type { ApiKey, CaptureRule, CreatedKey, KeyCreate, KeyLimits, Keys, KeyScope } from "../api.ts";
import { patch, post, Refused } from "../client.ts";
import { count } from "../format.ts";
import { useResource } from "../live.tsx";
import { revokeKey } from "../parts/actions.tsx";
import { useAsk, useSay } from "../parts/confirm.tsx";
import { Ago, Badge, Button, Choice, Empty, Failure, Panel, Table, Text, Waiting } from "../parts/ui.tsx";

const SCOPES: [KeyScope, string][] = [
  ["user", "user: the API at gateways"],
  ["admin", "admin: this page and its API"],
];
const CAPTURE: [CaptureRule, string][] = [
  ["never", "nothing"],
  ["asked", "requests with store=true"],
  ["default", "all but store=false"],
];
const LIMITS: [keyof KeyLimits, string, string][] = [
  ["requests_per_minute", "Requests a minute", "requests/min"],
  ["tokens_per_minute", "Tokens a minute", "tokens/min"],
  ["concurrency", "Requests at once", "at once"],
];
const NO_LIMITS: KeyLimits = { requests_per_minute: 0, tokens_per_minute: 0, concurrency: 0 };

export function KeysPage() {
  const { data, error, reload } = useResource<Keys>("keys", ["keys"]);
  const [editing, setEditing] = useState("");
  const edited = data?.keys.find((key) => key.id === editing && key.revoked === null);
  return (
    <>
      <h1>API keys</h1>
      {error && <Failure error={error} retry={reload} />}
      {data ? (
        <>
          <State keys={data} />
          <div className="grid two">
            <NewKey defaults={data.defaults} onMade={reload} />
            {edited && <EditKey key={edited.id} apiKey={edited} onDone={() => (setEditing(""), reload())} />}
            <List keys={data} onEdit={setEditing} />
          </div>
        </>
      ) : (
        !error && <Waiting />
      )}
    </>
  );
}

function State({ keys }: { keys: Keys }) {
  if (keys.trouble)
    return (
      <div className="notice bad" role="alert">
        <strong>{keys.trouble}</strong>
      </div>
    );
  if (!keys.asked)
    return (
      <div className="notice">
        <div>
          <strong>Gateways ask for no key.</strong> They listen on this machine only, or <code>gateway.auth</code> says so. Keys of scope admin
          open this page all the same.
        </div>
      </div>
    );
  if (!keys.keys.some((key) => key.scope === "user" && key.revoked === null))
    return (
      <div className="notice warn" role="alert">
        <strong>There is no key for gateways: nobody is served.</strong>
      </div>
    );
  return null;
}

function NewKey({ defaults, onMade }: { defaults: KeyLimits; onMade: () => void }) {
  const [body, setBody] = useState<KeyCreate>({ name: "", tenant: "", scope: "user", capture: "never" });
  const [limits, setLimits] = useState(NO_LIMITS);
  const [made, setMade] = useState<CreatedKey | null>(null);
  const [error, setError] = useState<Refused | null>(null);
  const [isBusy, setIsBusy] = useState(false);
  const go = async () => {
    setIsBusy(true);
    setError(null);
    try {
      setMade(await post<CreatedKey>("keys", { ...body, ...limits }));
      setBody({ ...body, name: "" });
      onMade();
    } catch (problem) {
      setError(problem instanceof Refused ? problem : new Refused(0, String(problem)));
    }
    setIsBusy(false);
  };
  return (
    <Panel title="New key" hint="Its hash is kept, and the key itself is shown once.">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!isBusy) void go();
        }}
      >
        <div className="filters">
          <Text label="Name" value={body.name} required maxLength={80} onChange={(event) => setBody({ ...body, name: event.target.value })} />
          <Text
            label="Tenant"
            value={body.tenant ?? ""}
            maxLength={80}
            placeholder="the name"
            onChange={(event) => setBody({ ...body, tenant: event.target.value })}
          />
          <Choice label="Opens" value={body.scope ?? "user"} options={SCOPES} onChange={(scope) => setBody({ ...body, scope })} />
          <Choice label="May be kept for training" value={body.capture ?? "never"} options={CAPTURE} onChange={(capture) => setBody({ ...body, capture })} />
          <LimitFields limits={limits} defaults={defaults} onChange={setLimits} />
          <Button type="submit" tone="primary" disabled={isBusy || !body.name.trim()}>
            {isBusy ? "Working …" : "Make key"}
          </Button>
        </div>
      </form>
      {error && (
        <p className="notice bad" role="alert">
          {error.message} {error.action}
        </p>
      )}
      {made && <Secret made={made} onClose={() => setMade(null)} />}
    </Panel>
  );
}

function Secret({ made, onClose }: { made: CreatedKey; onClose: () => void }) {
  const say = useSay();
  const copy = () =>
    navigator.clipboard.writeText(made.secret).then(
      () => say("Copied."),
      () => say("The browser does not let a page copy here: select it by hand."),
    );
  return (
    <div className="notice good" role="status">
      <div>
        <strong>The key of {made.key.name}, shown this once:</strong>
        <p>
          <code className="secret">{made.secret}</code>
        </p>
        <div className="panel-actions">
          <Button onClick={() => void copy()}>Copy</Button>
          <Button onClick={onClose}>I have it</Button>
        </div>
      </div>
    </div>
  );
}

function LimitFields(props: { limits: KeyLimits; defaults?: KeyLimits; onChange: (limits: KeyLimits) => void }) {
  return LIMITS.map(([name, label]) => (
    <Text
      key={name}
      label={label}
      type="number"
      min={0}
      max={1_000_000_000}
      step={1}
      value={props.limits[name] || ""}
      placeholder={props.defaults?.[name] ? String(props.defaults[name]) : "as configured"}
      onChange={(event) => props.onChange({ ...props.limits, [name]: Math.max(0, Math.trunc(Number(event.target.value) || 0)) })}
    />
  ));
}

function EditKey({ apiKey, onDone }: { apiKey: ApiKey; onDone: () => void }) {
  const [limits, setLimits] = useState(apiKey.limits);
  const [capture, setCapture] = useState(apiKey.capture);
  const [error, setError] = useState<Refused | null>(null);
  const say = useSay();
  const go = () =>
    patch<ApiKey>(`keys/${encodeURIComponent(apiKey.id)}`, { ...limits, capture }).then(
      (key) => (say(`${key.name} is changed; gateways follow within two seconds.`), onDone()),
      (problem: unknown) => setError(problem instanceof Refused ? problem : new Refused(0, String(problem))),
    );
  return (
    <Panel title={`Change ${apiKey.name}`} hint="An empty limit is the configuration's.">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void go();
        }}
      >
        <div className="filters">
          <LimitFields limits={limits} onChange={setLimits} />
          <Choice label="May be kept for training" value={capture} options={CAPTURE} onChange={setCapture} />
          <Button type="submit" tone="primary">
            Save
          </Button>
          <Button onClick={onDone}>Cancel</Button>
        </div>
      </form>
      {error && (
        <p className="notice bad" role="alert">
          {error.message} {error.action}
        </p>
      )}
    </Panel>
  );
}

const inWords = (limits: KeyLimits) =>
  LIMITS.filter(([name]) => limits[name])
    .map(([name, , words]) => `${count(limits[name])} ${words}`)
    .join(", ") || "as configured";

function List({ keys, onEdit }: { keys: Keys; onEdit: (id: string) => void }) {
  const ask = useAsk();
  return (
    <Panel title="Keys" className="wide-panel" hint={`Without limits of its own a key has: ${inWords(keys.defaults).replace("as configured", "none")}.`}>
      {keys.keys.length === 0 ? (
        <Empty title="There is no key yet." />
      ) : (
        <Table
          label="Keys"
          rows={keys.keys}
          rowKey={(key) => key.id}
          columns={[
            { key: "name", head: "Name", cell: (key) => <strong>{key.name}</strong> },
            { key: "id", head: "Id", cell: (key) => <code>{key.id}</code> },
            { key: "scope", head: "Scope", cell: (key) => <Badge tone={key.scope === "admin" ? "warn" : "plain"}>{key.scope}</Badge> },
            { key: "tenant", head: "Tenant", cell: (key) => key.tenant },
            { key: "capture", head: "Kept for training", wide: true, cell: (key) => CAPTURE.find(([rule]) => rule === key.capture)?.[1] ?? key.capture },
            { key: "limits", head: "Limits", cell: (key) => inWords(key.limits) },
            { key: "created", head: "Made", wide: true, cell: (key) => <Ago time={key.created} /> },
            {
              key: "state",
              head: "State",
              cell: (key) =>
                key.revoked === null ? (
                  <Badge tone="good">valid</Badge>
                ) : (
                  <>
                    <Badge tone="bad">revoked</Badge> <Ago time={key.revoked} />
                  </>
                ),
            },
            {
              key: "do",
              head: "Change",
              cell: (key) =>
                key.revoked === null ? (
                  <span className="panel-actions">
                    {key.scope === "user" && (
                      <Button onClick={() => onEdit(key.id)} aria-label={`Change ${key.name}`}>
                        Change
                      </Button>
                    )}
                    <Button tone="danger" onClick={() => ask(revokeKey(key))} aria-label={`Revoke ${key.name}`}>
                      Revoke
                    </Button>
                  </span>
                ) : (
                  "–"
                ),
            },
          ]}
        />
      )}
    </Panel>
  );
}
