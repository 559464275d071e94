// calls of the API -> values, or a `Refused` that says what is wrong and what to do.
import type { ApiError, Session } from "./api.ts";

const ROOT = "/admin/api/";

/** An answer with status >= 400, or none at all (status 0). */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly action = "",
    readonly field: string | null = null,
  ) {
    super(message);
  }
}

export type Params = Record<string, string | number | undefined>;

let csrf = "";
let onSignedOut: () => void = () => {};

/** What to do when the server no longer knows us. */
export function whenSignedOut(callback: () => void): void {
  onSignedOut = callback;
}

/** From now on this session's token goes with each change. */
export function setSession(session: Session | null): void {
  csrf = session?.csrf ?? "";
}

async function refusal(response: Response): Promise<Refused> {
  const body = (await response.json().catch(() => null)) as ApiError | null;
  if (body?.error) return new Refused(response.status, body.error.message, body.error.action, body.error.field);
  return new Refused(response.status, `Control answered ${response.status}.`);
}

async function call<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const headers: Record<string, string> = { accept: "application/json" };
  if (method !== "GET") headers["x-csrf-token"] = csrf;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(ROOT + path, {
      method,
      headers,
      body: body === undefined ? null : JSON.stringify(body),
      signal: signal ?? null,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused(0, "Control does not answer.", "Check that the cluster runs: paceline status");
  }
  if (!response.ok) {
    const refused = await refusal(response);
    if (response.status === 401 && path !== "session") onSignedOut();
    throw refused;
  }
  return (response.status === 204 ? undefined : await response.json()) as T;
}

/** `path?params`, without those that are empty. */
export function withParams(path: string, params: Params): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export const get = <T>(path: string, signal?: AbortSignal): Promise<T> => call<T>("GET", path, undefined, signal);
export const post = <T>(path: string, body: unknown): Promise<T> => call<T>("POST", path, body);
export const patch = <T>(path: string, body: unknown): Promise<T> => call<T>("PATCH", path, body);
export const remove = (path: string): Promise<void> => call<void>("DELETE", path);
