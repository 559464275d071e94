// a long list -> its first page, and more on demand. The first page follows changes; "more" is kept until they come.
import { useEffect, useState } from "react";
import type { Page, Resource } from "../api.ts";
import { get, Refused, withParams, type Params } from "../client.ts";
import { useResource } from "../live.tsx";
import { Button } from "./ui.tsx";

export interface Listed<T> {
  items: T[] | null;
  total: number;
  error: Refused | null;
  reload: () => void;
  /** Null when there is no more. */
  more: (() => void) | null;
}

export function usePages<T>(path: string, params: Params, resources: readonly Resource[]): Listed<T> {
  const first = withParams(path, params);
  const { data, error, reload } = useResource<Page<T>>(first, resources);
  const [rest, setRest] = useState<{ of: string; items: T[]; next: string | null }>({ of: "", items: [], next: null });
  const [failed, setFailed] = useState<Refused | null>(null);
  useEffect(() => setRest({ of: "", items: [], next: null }), [first]);
  const hasRest = rest.of === first;
  const next = hasRest ? rest.next : (data?.next ?? null);
  const more = () => {
    get<Page<T>>(withParams(path, { ...params, cursor: next ?? "" })).then(
      (page) => setRest((old) => ({ of: first, items: [...(old.of === first ? old.items : []), ...page.items], next: page.next })),
      (problem: unknown) => setFailed(problem instanceof Refused ? problem : new Refused(0, String(problem))),
    );
  };
  return {
    items: data ? [...data.items, ...(hasRest ? rest.items : [])] : null,
    total: data?.total ?? 0,
    error: error ?? failed,
    reload,
    more: next ? more : null,
  };
}

export function More({ list, shown }: { list: Listed<unknown>; shown: number }) {
  return (
    <p className="more">
      <span className="muted">
        {shown} of {list.total}
      </span>
      {list.more && <Button onClick={list.more}>Show more</Button>}
    </p>
  );
}
