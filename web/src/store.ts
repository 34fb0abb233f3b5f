/* All runs that the page knows, kept live. */

import { batch, computed, signal } from "@preact/signals";

import { api, ApiError, session } from "./api";
import { machineNow } from "./clock";
import { LiveStream } from "./stream";
import type { Health, Run } from "./types";

/** By id. The map is replaced, never changed, so that a reader sees every change. */
export const runs = signal<ReadonlyMap<string, Run>>(new Map());
/** Ids of runs that were removed while the page was open. */
export const removed = signal<ReadonlySet<string>>(new Set());
/** "loading": the first page has not come. "partial": it has, and more follows. */
export const loaded = signal<"loading" | "partial" | "all">("loading");
export const loadError = signal<ApiError | null>(null);
export const health = signal<Health | null>(null);
/** Said to screen readers. */
export const announcement = signal("");

/** The time of the runs' machine. Ticks once a second while the page is visible: for texts such as "3 s ago". */
export const now = signal(machineNow());

/** Nothing answers: neither reads nor the stream. */
export const isGatewayDown = signal(false);

export const stream = new LiveStream(
  (url) => new EventSource(url),
  () => void refreshHealth(), // it also finds out that the session has ended
);
stream.connection.subscribe((state) => {
  if (state === "live") isGatewayDown.value = false;
});

export const isDaemonDown = computed(() => ["down", "silent"].includes(health.value?.daemon ?? ""));

const FIRST_PAGE = 100;
const PAGE = 1000;
const FLUSH_MS = 100;
const MANY = 2000; // runs, from which on the table is drawn less often

/** Of two records of one run, the one that was written later. */
const newer = (old: Run | undefined, run: Run): Run => (old !== undefined && old.change > run.change ? old : run);

let changed = new Map<string, Run | null>(); // null: removed
let flushTimer: ReturnType<typeof setTimeout> | undefined;

/** Takes records that were just read or streamed. They are shown together, ten times a second at most. */
export function putRun(run: Run): void {
  const before = changed.get(run.run_id) ?? runs.value.get(run.run_id);
  if (before !== undefined && before.state !== run.state && before.change < run.change) {
    announcement.value = `Run ${run.run_id}: ${run.state.toLowerCase()}`;
  }
  changed.set(run.run_id, newer(before, run));
  scheduleFlush();
}

export function dropRun(runId: string): void {
  changed.set(runId, null);
  scheduleFlush();
}

function scheduleFlush(): void {
  flushTimer ??= setTimeout(flush, runs.value.size > MANY ? 4 * FLUSH_MS : FLUSH_MS);
}

/** Shows at once what was put. */
export function flush(): void {
  clearTimeout(flushTimer);
  flushTimer = undefined;
  if (changed.size === 0) return;
  const next = new Map(runs.value);
  const gone = new Set(removed.value);
  for (const [id, run] of changed) {
    if (run === null) {
      next.delete(id);
      gone.add(id);
    } else {
      next.set(id, newer(next.get(id), run));
      gone.delete(id); // another run took its id
    }
  }
  changed = new Map();
  batch(() => {
    runs.value = next;
    if (gone.size !== removed.value.size || [...gone].some((id) => !removed.value.has(id))) removed.value = gone;
  });
}

let generation = 0;

/** Reads all runs, page by page; the first page starts the live watch. A call ends the one before it. */
export async function loadRuns(): Promise<void> {
  const mine = ++generation;
  const seen = new Set<string>();
  const before = new Set(runs.value.keys());
  let token = "";
  try {
    do {
      const page = await api.listRuns({ limit: token === "" ? FIRST_PAGE : PAGE, page_token: token || null });
      if (mine !== generation) return;
      watch(page.change);
      for (const run of page.runs) {
        seen.add(run.run_id);
        changed.set(run.run_id, newer(changed.get(run.run_id) ?? undefined, run));
      }
      flush();
      token = page.next_page_token;
      loadError.value = null;
      if (loaded.value === "loading") loaded.value = "partial";
    } while (token !== "");
    for (const id of before) if (!seen.has(id)) dropRun(id); // removed while the page was not connected
    flush();
    loaded.value = "all";
  } catch (error) {
    if (mine === generation) loadError.value = asApiError(error);
  }
}

export const asApiError = (error: unknown): ApiError =>
  error instanceof ApiError ? error : new ApiError(0, "internal", error instanceof Error ? error.message : String(error));

export async function refreshHealth(): Promise<void> {
  try {
    health.value = await api.getHealth();
    isGatewayDown.value = false;
  } catch (error) {
    isGatewayDown.value = asApiError(error).status === 0;
  }
}

let isWatching = false;

/** Follows all changes after one that was read. */
function watch(change: number): void {
  if (isWatching) return;
  isWatching = true;
  stream.subscribe({
    topic: { kind: "runs", after: change },
    onSync: () => void loadRuns(),
    onMessage: (message) => {
      if (message.kind === "run") putRun(message.data);
      else if (message.kind === "removed") dropRun(message.data.run_id);
      else if (message.kind === "health") health.value = message.data;
    },
  });
}

/** Starts reading. Called once, after the login. */
export function startStore(): void {
  void loadRuns();
  setInterval(() => {
    if (document.hidden) return;
    now.value = machineNow();
    if (!isWatching && loadError.value !== null && session.value === "open" && now.value % 5000 < 1000) void loadRuns();
  }, 1000);
}
