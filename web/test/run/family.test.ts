import { expect, test } from "vitest";

import { findStepsPerEpoch } from "../../src/chart/run_clocks";
import { buildTree } from "../../src/run/family_tab";
import { listShown, listSteps } from "../../src/run/media_tab";
import { markPart, readMarks } from "../../src/run/run_model";
import type { Artifact } from "../../src/types";

const run = (run_id: string, parent_run_id: string, submitted_ms: number) => [run_id, { run_id, parent_run_id, submitted_ms }] as const;

test("a tree has every descendant once, the oldest first", () => {
  const all = new Map([run("c", "a", 3), run("b", "a", 2), run("a", "", 1), run("d", "b", 4), run("other", "", 5)]);
  expect(buildTree("a", all)).toEqual({
    runId: "a",
    children: [{ runId: "b", children: [{ runId: "d", children: [] }] }, { runId: "c", children: [] }],
  });
});

test("a cycle of parents, which cannot be, does not hang the page", () => {
  expect(buildTree("a", new Map([run("a", "b", 1), run("b", "a", 2)]))).toEqual({ runId: "a", children: [{ runId: "b", children: [] }] });
});

test("the slider has each step that something was written at", () => {
  const at = (step: number) => ({ step }) as Artifact;
  expect(listSteps([at(20), at(3), at(20)])).toEqual([3, 20]);
});

test("what a step shows keeps its place from step to step, videos first", () => {
  const of = (name: string, media_type: string) => ({ name, media_type, step: 5, attempt: 1 }) as Artifact;
  const written = [of("b.png", "image/png"), of("right.mp4", "video/mp4"), of("a.txt", "text/plain"), of("left.mp4", "video/mp4")];
  expect(listShown([...written, { ...of("old.png", "image/png"), step: 4 }], 5).map(({ name }) => name))
    .toEqual(["left.mp4", "right.mp4", "a.txt", "b.png"]);
});

test("the length of an epoch is read from the event at the start of training", () => {
  const event = { event: "log", seq: 1, attempt: 1, timestamp_ms: 0 };
  expect(findStepsPerEpoch([{ ...event }, { ...event, steps_per_epoch: 500 }])).toBe(500);
  expect(findStepsPerEpoch([{ ...event, steps_per_epoch: null }])).toBe(null);
});

test("the end of a run is a mark only if it failed", () => {
  const end = { kind: "end", step: 5, time_ms: 0, attempt: 1, text: "exited", artifact_id: "" };
  expect(readMarks([end], { state: "COMPLETED" })).toEqual([]);
  expect(readMarks([end], { state: "FAILED" })).toEqual([{ kind: "failure", step: 5, timeMs: null, text: "exited" }]);
});

test("on the curve of a line a parent has the marks of its own part, without its end and its best step", () => {
  const at = (kind: string, step: number) => ({ kind, step, time_ms: 0, attempt: 1, text: kind, artifact_id: "a" });
  const markers = [at("attempt", 0), at("checkpoint", 5), at("best", 6), at("kill", 8), at("checkpoint", 10), at("checkpoint", 15), at("end", 9)];
  const steps = (from_step: number, to_step: number | null) => markPart({ run_id: "a", from_step, to_step }, markers).map(({ step }) => step);
  expect(steps(0, 10)).toEqual([0, 5, 8, 10]);
  expect(steps(6, null)).toEqual([8, 10, 15]);
});
