// what operators may do -> the question each button asks. What will happen is said before it does.
import type { ApiKey, Version } from "../api.ts";
import { remove } from "../client.ts";
import { percent, tagName } from "../format.ts";
import type { Question } from "./confirm.tsx";

const forTag = (tag: string) => (tag ? `streams of ${tagName(tag)}` : "all streams without a version of their own");

export const trainNow = (tag = ""): Question => ({
  name: "train",
  body: { tag },
  title: tag ? `Train now for ${tagName(tag)}` : "Train now",
  effect: "A run begins with what was captured so far, as soon as the guard allows. What it makes still has to pass gate and canary before it serves.",
  label: "Train now",
});

export const pause = (): Question => ({
  name: "pause",
  body: {},
  title: "Pause learning",
  effect: "No run and no canary begins by itself until you resume. A run that is on stops. The live draft keeps serving, and capture goes on.",
  label: "Pause",
});

export const resume = (): Question => ({
  name: "resume",
  body: {},
  title: "Resume learning",
  effect: "Runs begin again by themselves when a trigger fires.",
  label: "Resume",
});

export const forget = (run_id: string): Question => ({
  name: "forget",
  body: { run_id, confirm: run_id },
  title: `Stop run ${run_id}`,
  effect: "The run ends now and what it learned is thrown away. What it captured from stays.",
  label: "Stop the run",
  isDangerous: true,
});

const gateSays = (version: Version) =>
  version.state === "rolled_back"
    ? `It was rolled back: ${version.reason} `
    : version.gate === null
    ? "The gate has not scored it. "
    : version.gate.passed
      ? `The gate expects it to save ${percent(version.gate.saving.mean)} of decode time. `
      : `The gate refused it: ${version.reason} `;

/** Against the gate's answer, or without one, it says so twice. */
const isAgainst = ({ gate, state }: Version) => !gate?.passed || state === "rejected" || state === "rolled_back";
const serveBody = (version: Version) => {
  const body = { version: version.version, tag: version.tag };
  return isAgainst(version) ? { ...body, force: true, confirm: version.version } : body;
};

export const canary = (version: Version, share: number | null): Question => ({
  name: "canary",
  body: serveBody(version),
  title: `Canary ${version.version}`,
  effect: `${gateSays(version)}It drafts for ${share === null ? "a share" : percent(share, 0)} of ${forTag(version.tag)}, then is promoted or rolled back by a sequential test. Nobody's text changes.`,
  label: isAgainst(version) ? "Start canary anyway" : "Start canary",
  isDangerous: isAgainst(version),
});

export const promote = (version: Version): Question => ({
  name: "promote",
  body: serveBody(version),
  title: `Promote ${version.version}`,
  effect: `${gateSays(version)}It becomes the live draft for ${forTag(version.tag)} at the next step, without a canary. The version before stays in memory for a roll back.`,
  label: isAgainst(version) ? "Promote anyway" : "Promote",
  isDangerous: isAgainst(version),
});

export const pin = (version: string, tag: string): Question => ({
  name: "pin",
  body: { tag },
  title: `Pin ${version}`,
  effect: `It stays live for ${forTag(tag)} until you unpin it. Runs and gate go on, but nothing replaces it by itself.`,
  label: "Pin",
});

export const unpin = (version: string, tag: string): Question => ({
  name: "unpin",
  body: { tag },
  title: `Unpin ${version}`,
  effect: "Better versions may replace it by themselves again.",
  label: "Unpin",
});

export const rollBack = (live: string, tag: string, canaryVersion: string): Question => ({
  name: "roll_back",
  body: { tag, confirm: tag || "everything" },
  title: canaryVersion ? `End the canary of ${canaryVersion}` : `Roll back ${live}`,
  effect: canaryVersion
    ? `${canaryVersion} stops drafting at the next step; ${live} takes all of ${forTag(tag)} again.`
    : `The version before ${live} drafts again for ${forTag(tag)} at the next step. Training waits for a while afterwards. No request is dropped.`,
  label: canaryVersion ? "End canary" : "Roll back",
  isDangerous: true,
});

export const revoke = (version: string): Question => ({
  name: "revoke",
  body: { version, confirm: version },
  title: `Revoke ${version}`,
  effect: "It is never served again; where it is live, the version before takes over. This cannot be undone.",
  label: "Revoke for good",
  isDangerous: true,
  mustType: version,
});

export const deleteTenant = (tenant: string): Question => ({
  name: "delete",
  body: { tenant, confirm: `tenant:${tenant}` },
  title: `Delete data of ${tenant}`,
  effect: `Everything captured from ${tenant} goes: shards, reservoir, held-out requests and checkpoints. Versions that learned from it are named and can be revoked. This cannot be undone.`,
  label: "Delete for good",
  isDangerous: true,
  mustType: tenant,
});

export const deleteRequest = (request_id: string): Question => ({
  name: "delete",
  body: { request_id, confirm: `request:${request_id}` },
  title: "Delete one request's data",
  effect: `Whatever was captured of ${request_id} goes, from everywhere. This cannot be undone.`,
  label: "Delete for good",
  isDangerous: true,
});

export const revokeKey = (key: ApiKey): Question => ({
  send: () => remove(`keys/${encodeURIComponent(key.id)}`).then(() => ({ message: `${key.name} is revoked.`, id: key.id })),
  title: `Revoke ${key.name}`,
  effect:
    key.scope === "admin"
      ? "It no longer opens this page, and sessions that were opened with it end. This cannot be undone."
      : "Gateways refuse it within two seconds; answers that are on their way still end. This cannot be undone.",
  label: "Revoke for good",
  isDangerous: true,
});
