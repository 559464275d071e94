// settings -> a form by section; what was changed is marked, saved together and goes to the audit.
import { useId, useState } from "react";
import type { Setting } from "../api.ts";
import { patch, Refused } from "../client.ts";
import { useResource } from "../live.tsx";
import { useSay } from "../parts/confirm.tsx";
import { Button, Empty, Failure, Panel, Waiting } from "../parts/ui.tsx";

type Draft = Record<string, string | boolean>;

export function SettingsPage() {
  const { data, error, reload } = useResource<Setting[]>("settings", ["settings"]);
  return (
    <>
      <h1>Settings</h1>
      <p className="lead">Changes hold at once and over restarts. The configuration file stays as it is.</p>
      {error && <Failure error={error} retry={reload} />}
      {data ? data.length ? <Form settings={data} onSaved={reload} /> : <Empty title="Nothing can be set while learning is off." /> : !error && <Waiting />}
    </>
  );
}

const parsed = (setting: Setting, raw: string | boolean): number | boolean | string | null => {
  if (setting.kind === "boolean" || setting.kind === "choice" || setting.kind === "text") return raw;
  const value = Number(raw);
  return raw === "" || Number.isNaN(value) ? null : value;
};

function problem(setting: Setting, raw: string | boolean): string {
  if (setting.kind !== "number" && setting.kind !== "integer") return "";
  const value = parsed(setting, raw);
  if (typeof value !== "number") return "A number, please.";
  if (setting.kind === "integer" && !Number.isInteger(value)) return "A whole number, please.";
  if (setting.min !== null && value < setting.min) return `At least ${setting.min}.`;
  if (setting.max !== null && value > setting.max) return `At most ${setting.max}.`;
  return "";
}

function Form({ settings, onSaved }: { settings: Setting[]; onSaved: () => void }) {
  const say = useSay();
  const [draft, setDraft] = useState<Draft>({});
  const [error, setError] = useState<Refused | null>(null);
  const [isBusy, setIsBusy] = useState(false);
  const byName = new Map(settings.map((setting) => [setting.name, setting]));
  const changed = Object.entries(draft).filter(([name, raw]) => {
    const setting = byName.get(name);
    return setting && parsed(setting, raw) !== setting.value;
  });
  const isWrong = changed.some(([name, raw]) => problem(byName.get(name)!, raw) !== "");
  const sections = [...new Set(settings.map((setting) => setting.section))];
  const save = async () => {
    setIsBusy(true);
    setError(null);
    try {
      const values = Object.fromEntries(
        changed.map(([name, raw]) => {
          const setting = byName.get(name)!;
          const value = parsed(setting, raw);
          return [name, value === setting.configured ? null : value];
        }),
      );
      await patch<Setting[]>("settings", { values });
      setDraft({});
      say(changed.length === 1 ? "One setting was changed." : `${changed.length} settings were changed.`);
      onSaved();
    } catch (failed) {
      setError(failed instanceof Refused ? failed : new Refused(0, String(failed)));
    } finally {
      setIsBusy(false);
    }
  };
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        if (changed.length && !isWrong) void save();
      }}
      noValidate
    >
      <div className="masonry">
        {sections.map((section) => (
          <Panel key={section} title={section}>
            {settings
              .filter((setting) => setting.section === section)
              .map((setting) => (
                <Row
                  key={setting.name}
                  setting={setting}
                  raw={draft[setting.name] ?? (setting.kind === "boolean" ? (setting.value as boolean) : String(setting.value))}
                  refused={error?.field && setting.name.endsWith(error.field) ? error.message : ""}
                  onChange={(raw) => setDraft((old) => ({ ...old, [setting.name]: raw }))}
                />
              ))}
          </Panel>
        ))}
      </div>
      {error && <Failure error={error} />}
      <div className="save-row">
        <span className="muted" role="status">
          {changed.length === 0 ? "No changes." : changed.length === 1 ? "1 change, not saved." : `${changed.length} changes, not saved.`}
        </span>
        <Button disabled={changed.length === 0 || isBusy} onClick={() => setDraft({})}>
          Discard
        </Button>
        <Button type="submit" tone="primary" disabled={changed.length === 0 || isWrong || isBusy}>
          {isBusy ? "Saving …" : "Save"}
        </Button>
      </div>
    </form>
  );
}

function Row(props: { setting: Setting; raw: string | boolean; refused: string; onChange: (raw: string | boolean) => void }) {
  const { setting, raw, onChange } = props;
  const id = useId();
  const wrong = problem(setting, raw) || props.refused;
  const value = parsed(setting, raw);
  const isChanged = value !== setting.value;
  const shared = { id, "aria-describedby": `${id}h`, "aria-invalid": wrong !== "", disabled: !setting.editable };
  return (
    <div className={`setting ${isChanged ? "changed" : ""}`}>
      <label htmlFor={id}>
        {setting.label}
        {isChanged && <span className="muted"> (not saved)</span>}
      </label>
      <div className="setting-input">
        {setting.kind === "boolean" ? (
          <input {...shared} type="checkbox" checked={raw === true} onChange={(event) => onChange(event.target.checked)} />
        ) : setting.kind === "choice" ? (
          <select {...shared} value={String(raw)} onChange={(event) => onChange(event.target.value)}>
            {setting.choices.map((choice) => (
              <option key={choice}>{choice}</option>
            ))}
          </select>
        ) : (
          <input {...shared} inputMode={setting.kind === "text" ? "text" : "decimal"} value={String(raw)} autoComplete="off" onChange={(event) => onChange(event.target.value)} />
        )}
        {setting.unit && <span className="muted">{setting.unit}</span>}
        {setting.editable && value !== setting.configured && (
          <Button tone="quiet" onClick={() => onChange(setting.kind === "boolean" ? (setting.configured as boolean) : String(setting.configured))}>
            Reset to {String(setting.configured)}
          </Button>
        )}
      </div>
      <p id={`${id}h`} className={wrong ? "bad" : "hint"}>
        {wrong || setting.help} {!setting.editable && "Set in the configuration file only."} <code>{setting.name}</code>
      </p>
    </div>
  );
}
