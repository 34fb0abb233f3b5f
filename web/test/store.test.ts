import { afterEach, beforeEach, expect, test, vi } from "vitest";

import type { Run } from "../src/types";
import { makeRun } from "./records";

let store: typeof import("../src/store");
let pages: { runs: Run[]; next_page_token: string; change: number }[];
let asked: string[];
let status: number;
const opened: string[] = [];

beforeEach(async () => {
  vi.useFakeTimers();
  vi.resetModules(); // the store is one per page
  opened.length = 0;
  asked = [];
  status = 200;
  vi.stubGlobal("EventSource", class {
    constructor(url: string) { opened.push(url); }
    addEventListener(): void { /* the stream has tests of its own */ }
    close(): void { /* see above */ }
  });
  vi.stubGlobal("fetch", async (url: string) => {
    asked.push(url);
    const body = status === 200 ? pages.shift() : { error: { code: "unavailable", message: "No daemon answers.", faults: [] } };
    return new Response(JSON.stringify(body), { status });
  });
  store = await import("../src/store");
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

const ids = (): string[] => [...store.runs.value.keys()];
const page = (names: string[], next = "", change = 1) => ({ runs: names.map((run_id) => makeRun({ run_id, change })), next_page_token: next, change });

test("all pages are read, and the stream is opened after the change of the first", async () => {
  pages = [page(["c", "b"], "more", 40), page(["a"], "", 41)];
  await store.loadRuns();
  await vi.runOnlyPendingTimersAsync();
  expect(ids()).toEqual(["c", "b", "a"]);
  expect(store.loaded.value).toBe("all");
  expect(asked.map((url) => url.split("?")[1])).toEqual(["limit=100", "limit=1000&page_token=more"]);
  expect(opened).toEqual(["/api/v1/stream?watch=runs&after_change=40"]);
});

test("of two records of one run the later one is shown, whichever comes first", () => {
  store.putRun(makeRun({ run_id: "a", change: 5, step: 50 }));
  store.putRun(makeRun({ run_id: "a", change: 4, step: 40 }));
  store.flush();
  expect(store.runs.value.get("a")?.step).toBe(50);
  store.putRun(makeRun({ run_id: "a", change: 3, step: 30 }));
  store.flush();
  expect(store.runs.value.get("a")?.step).toBe(50);
});

test("changes are shown together, and a reader gets a new map", () => {
  const before = store.runs.value;
  for (let step = 1; step <= 50; step++) store.putRun(makeRun({ run_id: "a", change: step, step }));
  expect(store.runs.value).toBe(before);
  vi.advanceTimersByTime(100);
  expect(store.runs.value).not.toBe(before);
  expect(store.runs.value.get("a")?.step).toBe(50);
});

test("a second read drops runs that are gone, and keeps one that was submitted meanwhile", async () => {
  pages = [page(["a", "b"])];
  await store.loadRuns();
  pages = [page(["b"])];
  const reading = store.loadRuns();
  store.putRun(makeRun({ run_id: "new", change: 9 }));
  await reading;
  expect(ids().sort()).toEqual(["b", "new"]);
});

test("a change of state is said to screen readers; the first record of a run is not", () => {
  store.putRun(makeRun({ run_id: "a", change: 1 }));
  store.flush();
  expect(store.announcement.value).toBe("");
  store.putRun(makeRun({ run_id: "a", change: 2, state: "FAILED" }));
  expect(store.announcement.value).toBe("Run a: failed");
});

test("a read that fails says why, and leaves what is shown", async () => {
  pages = [page(["a"])];
  await store.loadRuns();
  status = 503;
  await store.loadRuns();
  expect(store.loadError.value?.message).toBe("No daemon answers.");
  expect(ids()).toEqual(["a"]);
});

test("401 closes the session", async () => {
  status = 401;
  await store.loadRuns();
  const { session } = await import("../src/api");
  expect(session.value).toBe("closed");
});

test("a run that is removed is known to be, until another one takes its id", async () => {
  store.putRun(makeRun({ run_id: "a", change: 1 }));
  store.flush();
  store.dropRun("a");
  store.flush();
  expect([...store.removed.value]).toEqual(["a"]);
  store.putRun(makeRun({ run_id: "a", change: 3 }));
  store.flush();
  expect([ids(), [...store.removed.value]]).toEqual([["a"], []]);
});
