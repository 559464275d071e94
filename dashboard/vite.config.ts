// src/ -> cluster/admin/static/: the bundle that ships, with names that carry a hash, and a stamp of the source it was made from.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";
import { scripted } from "./dev/plugin.ts";

const ROOT = import.meta.dirname;
const OUT = join(ROOT, "../cluster/admin/static");
/** What the bundle depends on; tests/cluster/test_dashboard_bundle.py hashes the same files. */
const SOURCES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "public", "src"];

function files(path: string): string[] {
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path).flatMap((name) => files(join(path, name)));
}

function sourceHash(): string {
  const hash = createHash("sha256");
  const all = SOURCES.flatMap((name) => files(join(ROOT, name))).map((path) => relative(ROOT, path).split("\\").join("/"));
  for (const path of all.sort()) hash.update(`${path}\0`).update(readFileSync(join(ROOT, path))).update("\0");
  return hash.digest("hex");
}

const stamp: Plugin = {
  name: "stamp",
  apply: "build",
  closeBundle() {
    writeFileSync(join(OUT, "source.sha256"), `${sourceHash()}\n`);
  },
};

export default defineConfig({
  base: "/admin/",
  plugins: [react(), stamp, scripted()],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: ["chrome123", "firefox120", "safari17.5"],
    assetsInlineLimit: 0, // data: URLs are against the content security policy
    modulePreload: { polyfill: false },
  },
  server: { host: "127.0.0.1", port: 5173 },
});
