// Vite's server -> the admin API of a made-up cluster. `npm run dev`, then any key. ?off and ?empty in `POST /admin/api/dev` change it.
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Connect, Plugin } from "vite";
import type { ActionBody, ActionName, KeyCreate, KeyUpdate } from "../src/api.ts";
import { Refusal, World } from "./world.ts";

const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

async function body<T>(request: IncomingMessage): Promise<T> {
  let text = "";
  for await (const chunk of request) text += String(chunk);
  return (text ? JSON.parse(text) : {}) as T;
}

function handler(): Connect.NextHandleFunction {
  let world = new World();
  let isIn = false;
  setInterval(() => world.tick(), 1000).unref();
  const session = () => ({ who: "key:5a1c", csrf: "t", expires: Date.now() / 1000 + 3600, model: "paceline-tiny", build: "dev" });
  const page = <T>(items: T[]) => ({ items, total: items.length, next: null });

  const answer = async (request: IncomingMessage, path: string, query: URLSearchParams): Promise<unknown> => {
    const [what = "", id = ""] = path.split("/").map(decodeURIComponent);
    if (what === "dev") {
      world = new World();
      world.isOff = query.has("off");
      world.isEmpty = query.has("empty");
      if (world.isOff) world.drafts = world.drafts.slice(0, 1).map((draft) => ({ ...draft, state: "live" as const, reason: "of the configuration" }));
      if (world.isOff || world.isEmpty) world.runs = [];
      return {};
    }
    if (what === "session") {
      if (request.method === "POST") {
        if ((await body<{ key: string }>(request)).key === "wrong") throw new Refusal(401, "the admin key is not valid");
        isIn = true;
        world.note("key:5a1c", "sign_in", "", "");
      }
      if (request.method === "DELETE") isIn = false;
      if (!isIn) throw new Refusal(401, "this browser is not signed in");
      return session();
    }
    if (what === "actions") return world.act(id as ActionName, await body<ActionBody>(request));
    if (what === "keys" && request.method === "POST") return world.makeKey(await body<KeyCreate>(request));
    if (what === "keys" && request.method === "PATCH") return world.changeKey(id, await body<KeyUpdate>(request));
    if (what === "keys" && request.method === "DELETE") return world.changeKey(id, null);
    if (what === "keys") return world.keys();
    if (what === "versions" && id) return world.detail(id);
    if (what === "versions")
      return page([...world.drafts].reverse().map((draft) => world.summary(draft)).filter((one) => (!query.get("state") || one.state === query.get("state")) && (one.version + one.reason).includes(query.get("q") ?? "")));
    if (what === "runs" && id) {
      const run = world.runs.find((one) => one.run_id === id);
      if (!run) throw new Refusal(404, `There is no run ${id}.`);
      return { ...run, ledger: world.ledger().runs.find((row) => row.run_id === id) ?? null };
    }
    switch (what) {
      case "overview": return world.overview();
      case "workers": return world.workers();
      case "lineage": return world.lineage();
      case "runs": return page(world.runs.filter((run) => !query.get("state") || run.state === query.get("state")));
      case "ledger": return world.ledger();
      case "drift": return world.drift();
      case "guard": return world.guard();
      case "figures": return world.figures(Number(query.get("window_s") ?? 3600));
      case "capture": return world.capture();
      case "audit": return page(world.audit.filter((row) => !query.get("action") || row.action === query.get("action")));
      case "settings": return world.settings();
      default: throw new Refusal(404, "There is no such path.");
    }
  };

  const stream = (response: ServerResponse) => {
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const send = (event: string, data: unknown) => response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
    const beat = () => {
      send("overview", world.overview());
      send("workers", world.workers());
      const delta = world.delta();
      if (delta.points.length || delta.marks.length) send("figures", delta);
      if (world.changed.size) send("changed", { what: [...world.changed] });
      world.changed.clear();
    };
    beat();
    const timer = setInterval(beat, 1000);
    response.on("close", () => clearInterval(timer));
  };

  return (request, response, next) => {
    const url = new URL(request.url ?? "/", "http://localhost");
    if (!url.pathname.startsWith("/admin/api/")) {
      if (!process.argv.includes("dev")) response.setHeader("content-security-policy", CSP);
      next();
      return;
    }
    const path = url.pathname.slice("/admin/api/".length);
    if (path === "events") {
      stream(response);
      return;
    }
    answer(request, path, url.searchParams).then(
      (value) => response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(value)),
      (error: unknown) => {
        const refusal = error instanceof Refusal ? error : new Refusal(500, String(error));
        response.writeHead(refusal.status, { "content-type": "application/json" }).end(
          JSON.stringify({ error: { code: "refused", message: refusal.message, action: refusal.action, field: refusal.field } }),
        );
      },
    );
  };
}

export function scripted(): Plugin {
  return {
    name: "scripted",
    configureServer: (server) => void server.middlewares.use(handler()),
    configurePreviewServer: (server) => void server.middlewares.use(handler()),
  };
}
