// the address's fragment -> page, what it shows, and its filters: every view can be linked to.
import { useCallback, useSyncExternalStore } from "react";

export interface Place {
  page: string;
  id: string;
  query: URLSearchParams;
}

function subscribe(callback: () => void): () => void {
  window.addEventListener("hashchange", callback);
  return () => window.removeEventListener("hashchange", callback);
}

export function parse(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [page = "", id = ""] = path.split("/").map(decodeURIComponent);
  return { page: page || "overview", id, query: new URLSearchParams(query) };
}

export function usePlace(): Place {
  return parse(useSyncExternalStore(subscribe, () => window.location.hash));
}

export function link(page: string, id = "", query: Record<string, string> = {}): string {
  const filled = Object.entries(query).filter(([, value]) => value !== "");
  const text = new URLSearchParams(filled).toString();
  return `#/${page}${id ? `/${encodeURIComponent(id)}` : ""}${text ? `?${text}` : ""}`;
}

/** Filters of this page; changing one replaces the address, so that Back leaves the page and not the filter. */
export function useFilters(): [(name: string) => string, (changes: Record<string, string>) => void] {
  const place = usePlace();
  const read = (name: string) => place.query.get(name) ?? "";
  const write = useCallback((changes: Record<string, string>) => {
    const now = parse(window.location.hash);
    const next = { ...Object.fromEntries(now.query), ...changes };
    window.history.replaceState(null, "", link(now.page, now.id, next));
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }, []);
  return [read, write];
}
