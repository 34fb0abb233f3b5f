import { expect, test, vi } from "vitest";

import { findWrongWords, isAnyOn, Lookout, NO_RULES, readRules, type Rules } from "../src/alerts/rules";
import { LiveStream, pauseWhileHidden } from "../src/stream";
import type { Run } from "../src/types";
import { makeRun } from "./records";

const MINUTE = 60_000;

/** What each of these states of one run, a minute apart, alerts. */
function watch(rules: Partial<Rules>, states: readonly Partial<Run>[]): string[][] {
  const lookout = new Lookout({ ...NO_RULES, ...rules });
  return states.map((state, minute) =>
    lookout.look(new Map([["run", makeRun({ attempt: 1, ...state })]]), minute * MINUTE).map(({ text }) => text));
}

test("an end is alerted once, and not where it was so when the page was opened", () => {
  const failed = { state: "FAILED", ended_ms: 1, step: 7, reason: "out of memory" } as const;
  expect(watch({ failed: true }, [{}, failed, failed])).toEqual([[], ["run: failed at step 7: out of memory"], []]);
  expect(watch({ failed: true }, [failed, failed])).toEqual([[], []]);
  expect(watch({ ended: true }, [{}, failed])).toEqual([[], []]);
  expect(watch({ ended: true }, [{}, { state: "COMPLETED", ended_ms: 1, step: 9 }])).toEqual([[], ["run: completed at step 9"]]);
});

test("a run that came and failed between two looks is alerted", () => {
  const lookout = new Lookout({ ...NO_RULES, failed: true });
  lookout.look(new Map(), 0);
  const runs = new Map([["new", makeRun({ run_id: "new", state: "FAILED", ended_ms: 1 })]]);
  expect(lookout.look(runs, 1).map(({ runId }) => runId)).toEqual(["new"]);
});

test("a limit is alerted each time that it is passed, not as long as it is", () => {
  const at = (loss: Run["metrics"][string]) => ({ metrics: { "train/loss": loss }, step: 5 });
  expect(watch({ metrics: "loss>5" }, [at(1), at(6), at(7), at(2), at(9)]))
    .toEqual([[], ["run: loss>5 holds at step 5"], [], [], ["run: loss>5 holds at step 5"]]);
  expect(watch({ nonFinite: true }, [at(1), at("nan"), at("nan")])).toEqual([[], ["run: a metric is NaN or infinite at step 5"], []]);
});

test("a running run that makes no step is alerted after the given time, a waiting one never", () => {
  const running = { state: "RUNNING", step: 3 } as const;
  expect(watch({ stalledMin: 2 }, [running, running, running, running, { ...running, step: 4 }, { ...running, step: 4 }, { ...running, step: 4 }]))
    .toEqual([[], [], ["run: no new step for 2 min, since step 3"], [], [], [], ["run: no new step for 2 min, since step 4"]]);
  expect(watch({ stalledMin: 1 }, [{ state: "PENDING" }, { state: "PENDING" }, { state: "PENDING" }]).flat()).toEqual([]);
});

test("another attempt is alerted, the first one is not", () => {
  expect(watch({ retried: true }, [{ state: "PENDING", attempt: 0 }, { attempt: 1 }, { attempt: 2 }])).toEqual([[], [], ["run: attempt 2 was started"]]);
});

test("only runs that match the filter are alerted", () => {
  expect(watch({ failed: true, only: "-run" }, [{}, { state: "FAILED", ended_ms: 1 }]).flat()).toEqual([]);
});

test("kept rules are read, and what is wrong in them is off", () => {
  expect(readRules('{"failed":true,"stalledMin":"9","other":1}')).toEqual({ ...NO_RULES, failed: true });
  for (const text of [null, "null", "[1]", "not JSON"]) expect(isAnyOn(readRules(text))).toBe(false);
  expect(findWrongWords("loss>5 loss >1e3 val/x<=-.5")).toEqual(["loss", ">1e3"]);
});

test("a hidden page keeps its stream while alerts need it", () => {
  vi.useFakeTimers();
  const isNeeded = { now: false };
  const page = Object.assign(new EventTarget(), { hidden: true });
  const stream = new LiveStream(() => ({ addEventListener: () => undefined, close: () => undefined }));
  pauseWhileHidden(stream, () => isNeeded.now, page as unknown as Document, () => true, new EventTarget() as unknown as Window);
  const hide = (hidden: boolean): string => {
    page.hidden = hidden;
    page.dispatchEvent(new Event("visibilitychange"));
    vi.advanceTimersByTime(10 * MINUTE);
    return stream.connection.value;
  };
  expect(hide(true)).toBe("paused");
  expect(hide(false)).not.toBe("paused");
  isNeeded.now = true;
  expect(hide(true)).not.toBe("paused");
  vi.useRealTimers();
});

test("a page that is left keeps no connection, also if the browser keeps it for the way back", () => {
  const [page, frame] = [Object.assign(new EventTarget(), { hidden: false }), new EventTarget()];
  const stream = new LiveStream(() => ({ addEventListener: () => undefined, close: () => undefined }));
  pauseWhileHidden(stream, () => true, page as unknown as Document, () => true, frame as unknown as Window);
  frame.dispatchEvent(new Event("pagehide"));
  expect(stream.connection.value).toBe("paused");
  frame.dispatchEvent(Object.assign(new Event("pageshow"), { persisted: true }));
  expect(stream.connection.value).toBe("connecting");
});

test("a page that was opened behind another one does not keep its stream either", () => {
  vi.useFakeTimers();
  const page = Object.assign(new EventTarget(), { hidden: true });
  const stream = new LiveStream(() => ({ addEventListener: () => undefined, close: () => undefined }));
  pauseWhileHidden(stream, () => false, page as unknown as Document, () => true, new EventTarget() as unknown as Window);
  vi.advanceTimersByTime(MINUTE);
  expect(stream.connection.value).toBe("paused");
  vi.useRealTimers();
});
