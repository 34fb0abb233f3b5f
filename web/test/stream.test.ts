import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";

import { LiveStream, type Message, type Source, type Subscription } from "../src/stream";

class FakeSource implements Source {
  listeners = new Map<string, (event: MessageEvent) => void>();
  isClosed = false;
  constructor(readonly url: string) {}
  addEventListener(type: string, listener: (event: MessageEvent) => void): void { this.listeners.set(type, listener); }
  close(): void { this.isClosed = true; }
  emit(type: string, data: unknown = {}, id = ""): void {
    this.listeners.get(type)?.({ data: JSON.stringify(data), lastEventId: id } as MessageEvent);
  }
}

let sources: FakeSource[];
let stream: LiveStream;
const newest = (): FakeSource => sources.at(-1)!;
const asked = (): string => decodeURIComponent(newest().url.split("?")[1] ?? "");

function reader(topic: Subscription["topic"]) {
  const got: Message[] = [];
  const onSync = vi.fn();
  return { got, onSync, topic, onMessage: (message: Message) => { got.push(message); } };
}

beforeEach(() => {
  vi.useFakeTimers();
  sources = [];
  stream = new LiveStream((url) => { const source = new FakeSource(url); sources.push(source); return source; });
});

afterEach(() => { vi.useRealTimers(); });

test("subscriptions made in one go share one connection", () => {
  stream.subscribe(reader({ kind: "runs", after: 7 }));
  stream.subscribe(reader({ kind: "events", runId: "a", after: 3 }));
  stream.subscribe(reader({ kind: "log", runId: "a" }));
  vi.runAllTimers();
  expect(sources).toHaveLength(1);
  expect(asked()).toBe("watch=runs&after_change=7&events=a:3&log=a");
});

test("who says nothing about what it has fetches once the stream is live; who does, does not", () => {
  const fresh = reader({ kind: "events", runId: "a" });
  const known = reader({ kind: "runs", after: 1 });
  stream.subscribe(fresh);
  stream.subscribe(known);
  vi.runAllTimers();
  expect(fresh.onSync).not.toHaveBeenCalled();
  newest().emit("open");
  expect(fresh.onSync).toHaveBeenCalledTimes(1);
  expect(known.onSync).not.toHaveBeenCalled();
});

test("messages reach only those who asked for them", () => {
  const runs = reader({ kind: "runs", after: 0 });
  const events = reader({ kind: "events", runId: "a" });
  const other = reader({ kind: "events", runId: "b" });
  for (const one of [runs, events, other]) stream.subscribe(one);
  vi.runAllTimers();
  newest().emit("run", { run_id: "a" }, "c=5;r=0");
  newest().emit("events", { run_id: "a", events: [{ seq: 9 }] }, "c=5;r=0;e:a=9");
  newest().emit("end", { run_id: "b" }, "c=5;r=0");
  expect(runs.got.map((one) => one.kind)).toEqual(["run"]);
  expect(events.got.map((one) => one.kind)).toEqual(["events"]);
  expect(other.got.map((one) => one.kind)).toEqual(["end"]);
});

describe("a broken connection", () => {
  test("is opened again from the last positions, without a fetch, later each time", () => {
    const failures = vi.fn();
    stream = new LiveStream((url) => { const source = new FakeSource(url); sources.push(source); return source; }, failures);
    const one = reader({ kind: "runs", after: 0 });
    stream.subscribe(one);
    stream.subscribe(reader({ kind: "log", runId: "a" }));
    vi.runAllTimers();
    newest().emit("open");
    newest().emit("run", { run_id: "a" }, "c=41;r=0");
    vi.advanceTimersByTime(3000);
    newest().emit("run", { run_id: "a" }, "c=42;r=0"); // too new: removals before it may not have come yet
    newest().emit("log", { run_id: "a", offset: 0, next_offset: 88, text: "…" }, "c=42;r=0;l:a=88");
    newest().emit("error");
    expect(stream.connection.value).toBe("lost");
    expect(newest().isClosed).toBe(true);
    expect(failures).toHaveBeenCalledTimes(1);
    vi.advanceTimersByTime(500);
    expect(asked()).toBe("watch=runs&after_change=41&log=a:88");
    newest().emit("error");
    vi.advanceTimersByTime(999);
    expect(sources).toHaveLength(2);
    vi.advanceTimersByTime(1);
    expect(sources).toHaveLength(3);
    newest().emit("open");
    expect(stream.connection.value).toBe("live");
    expect(one.onSync).not.toHaveBeenCalled();
  });

  test("what comes late from a closed one is not taken", () => {
    const one = reader({ kind: "runs", after: 0 });
    stream.subscribe(one);
    vi.runAllTimers();
    const old = newest();
    old.emit("error");
    old.emit("run", { run_id: "a" }, "c=5;r=0");
    expect(one.got).toEqual([]);
  });
});

test("after a reset everybody fetches, and the old positions are forgotten", () => {
  const one = reader({ kind: "runs", after: 3 });
  const two = reader({ kind: "events", runId: "a", after: 3 });
  stream.subscribe(one);
  stream.subscribe(two);
  vi.runAllTimers();
  newest().emit("open");
  newest().emit("reset", { reason: "too slow" }, "c=90;r=90");
  expect([one.onSync.mock.calls.length, two.onSync.mock.calls.length]).toEqual([1, 1]);
  newest().emit("error");
  vi.advanceTimersByTime(500);
  expect(asked()).toBe("watch=runs&events=a");
  newest().emit("open"); // from now on: what was missed in between is fetched
  expect([one.onSync.mock.calls.length, two.onSync.mock.calls.length]).toEqual([2, 2]);
});

test("a fault of one topic is passed on", () => {
  const faults: string[] = [];
  stream.onFault = (message) => faults.push(message);
  stream.subscribe(reader({ kind: "events", runId: "a" }));
  vi.runAllTimers();
  newest().emit("fault", { message: "run a was removed" });
  expect(faults).toEqual(["run a was removed"]);
});

test("a second reader of the same topic opens nothing, and fetches", () => {
  stream.subscribe(reader({ kind: "events", runId: "a" }));
  vi.runAllTimers();
  newest().emit("open");
  const late = reader({ kind: "events", runId: "a" });
  const end = stream.subscribe(late);
  vi.runAllTimers();
  expect(sources).toHaveLength(1);
  expect(late.onSync).toHaveBeenCalledTimes(1);
  end();
  vi.runAllTimers();
  expect(sources).toHaveLength(1);
});

test("the connection ends with its last reader", () => {
  const end = stream.subscribe(reader({ kind: "runs", after: 0 }));
  vi.runAllTimers();
  end();
  vi.runAllTimers();
  expect(newest().isClosed).toBe(true);
});

test("a paused stream holds no connection, and goes on where it was", () => {
  stream.subscribe(reader({ kind: "runs", after: 1 }));
  vi.runAllTimers();
  newest().emit("run", { run_id: "a" }, "c=6;r=0");
  vi.advanceTimersByTime(3000);
  newest().emit("run", { run_id: "a" }, "c=7;r=0");
  stream.setPaused(true);
  vi.runAllTimers();
  expect(newest().isClosed).toBe(true);
  stream.setPaused(false);
  vi.runAllTimers();
  expect(asked()).toBe("watch=runs&after_change=6");
});
