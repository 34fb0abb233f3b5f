import { expect, test } from "vitest";

import { findOverrides, findTarget, flatten, listNames, parseValue, setValue } from "../../src/run/fork_target";
import type { Artifact } from "../../src/types";

const checkpoint = (step: number, more: Partial<Artifact> = {}): Artifact => ({
  artifact_id: `c${step}`, run_id: "r", attempt: 1, step, kind: "checkpoint", media_type: "", name: `step-${step}`, size_bytes: 1,
  sha256: "x", created_ms: 0, poster_id: "", is_present: true, state: "", reason: "",
  cause: { id: "", fault: "", waits_for: [], next_attempt_ms: 0, values: {} }, ...more,
});

test("a fork starts from the newest checkpoint at or before the clicked step", () => {
  const found = findTarget([checkpoint(100), checkpoint(300), checkpoint(200)], 250);
  expect([found?.step, found?.isAfter]).toEqual([200, false]);
});

test("a click before every checkpoint offers the first one, and says so", () => {
  const found = findTarget([checkpoint(300), checkpoint(100)], 50);
  expect([found?.step, found?.isAfter]).toEqual([100, true]);
});

test("checkpoints that are gone, and other artifacts, are no targets", () => {
  expect(findTarget([checkpoint(100, { is_present: false }), checkpoint(50, { kind: "sample" })], 250)).toBe(null);
});

test("of two checkpoints of one step the later attempt's is taken", () => {
  expect(findTarget([checkpoint(100, { attempt: 2, artifact_id: "new" }), checkpoint(100)], 100)?.artifact.artifact_id).toBe("new");
});

test("only what was changed is sent, also deep in a table; what was removed is null", () => {
  const old = { max_steps: 10, hyperparams: { lr: 0.1, layers: [1, 2], name: "a" }, tags: {} };
  expect(findOverrides(old, old)).toEqual({});
  expect(findOverrides(old, { max_steps: 20, hyperparams: { lr: 0.2, layers: [1, 2] }, tags: {} }))
    .toEqual({ max_steps: 20, hyperparams: { lr: 0.2, name: null } });
});

test("a value is changed by its dotted name", () => {
  const config = { hyperparams: { lr: 0.1 }, "a.b": { c: 1 } };
  expect(flatten(config)).toEqual([["hyperparams.lr", 0.1], ["a.b.c", 1]]);
  expect(setValue(config, "hyperparams.lr", 1)).toEqual({ hyperparams: { lr: 1 }, "a.b": { c: 1 } });
  expect(setValue(config, "a.b.c", 2)).toEqual({ hyperparams: { lr: 0.1 }, "a.b": { c: 2 } });
  expect(config.hyperparams.lr).toBe(0.1);
});

test("what is typed keeps the type of what was there", () => {
  expect([parseValue("1e-3", 0.1), parseValue("[1, 2]", [1]), parseValue("5", "4"), parseValue("abc", 1), parseValue("true", false)])
    .toEqual([0.001, [1, 2], "5", "abc", true]);
});

test("a table that lost its last field is one change, of that field", () => {
  const [now, before] = [{ hyperparams: {}, env: {}, seed: 1 }, { hyperparams: { fail_at: 30 }, seed: 1 }];
  expect(listNames(new Map(flatten(now)), new Map(flatten(before)))).toEqual(["env", "seed", "hyperparams.fail_at"]);
});
