/* Where the page is: path and query string, as signals. Every view keeps its state in the query, so a link shows it. */

import { batch, signal } from "@preact/signals";

export const path = signal("/");
export const query = signal<URLSearchParams>(new URLSearchParams());

/** What a view is called by, and the run it is about. */
export type Route =
  | { view: "runs" }
  | { view: "run"; runId: string }
  | { view: "compare" }
  | { view: "machine" }
  | { view: "submit" }
  | { view: "missing" };

export function matchRoute(pathname: string): Route {
  const parts = pathname.split("/").filter((part) => part !== "");
  const [first, second] = parts;
  if (first === undefined) return { view: "runs" };
  if (first === "runs" && parts.length === 1) return { view: "runs" };
  if (first === "runs" && second !== undefined && parts.length === 2) {
    try {
      return { view: "run", runId: decodeURIComponent(second) };
    } catch {
      return { view: "missing" };
    }
  }
  if (parts.length === 1 && (first === "compare" || first === "machine" || first === "submit")) return { view: first };
  return { view: "missing" };
}

function readPlace(url: string = location.href): void {
  const place = new URL(url, location.origin);
  batch(() => {
    path.value = place.pathname;
    query.value = place.searchParams;
  });
}

/** Goes to a path with its query. `replace`: the way back skips the place that is left. */
export function navigate(url: string, { replace = false }: { replace?: boolean } = {}): void {
  if (url !== location.pathname + location.search) {
    try {
      if (replace) history.replaceState(null, "", url);
      else history.pushState(null, "", url);
    } catch {
      // Some browsers allow 100 changes in 30 s. The view follows all the same; the address does with the next change.
    }
  }
  readPlace(url);
}

export type QueryChange = Record<string, string | readonly string[] | null>;

/** A query with some names changed; null, "" and [] remove a name. Names are sorted: one view has one address. */
export function changeQuery(old: URLSearchParams, change: QueryChange): URLSearchParams {
  const next = new URLSearchParams(old);
  for (const [name, value] of Object.entries(change)) {
    next.delete(name);
    if (value === null || value === "") continue;
    if (typeof value === "string") next.append(name, value);
    else for (const one of value) next.append(name, one);
  }
  next.sort();
  return next;
}

/** Changes the query of the current view. It replaces the entry in the history, unless `push` is asked for. */
export function setQuery(change: QueryChange, { push = false }: { push?: boolean } = {}): void {
  const next = changeQuery(query.value, change).toString();
  navigate(path.value + (next === "" ? "" : `?${next}`), { replace: !push });
}

export const runUrl = (runId: string): string => `/runs/${encodeURIComponent(runId)}`;

export function compareUrl(runIds: readonly string[]): string {
  return `/compare?${new URLSearchParams(runIds.map((id) => ["run", id])).toString()}`;
}

/** Whether a click on a link is ours to follow: plain, same origin, not a download or an API address. */
function isOurs(event: MouseEvent, link: HTMLAnchorElement): boolean {
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  return (
    isPlain &&
    !event.defaultPrevented &&
    link.origin === location.origin &&
    !link.hasAttribute("download") &&
    (link.target === "" || link.target === "_self") &&
    !link.pathname.startsWith("/api/") &&
    link.hash === ""
  );
}

/** Follows links within the page without loading it again. Called once. */
export function startRouter(): void {
  readPlace();
  addEventListener("popstate", () => readPlace());
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    if (link === null || link.getAttribute("href") === null || !isOurs(event, link)) return;
    event.preventDefault();
    const before = path.value;
    navigate(link.pathname + link.search);
    if (path.value !== before) scrollTo(0, 0);
  });
}
