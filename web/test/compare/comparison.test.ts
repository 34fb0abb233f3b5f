import { expect, test } from "vitest";

import { type Comparison, differencesOf, unknownOf, zoomAtStep } from "../../src/compare/comparison";

const comparison: Comparison = {
  runs: ["a", "b", "c"],
  config: { "hyperparams.lr": [0.1, 0.2, 0.1], seed: [1, 1, 2] },
  code: { "model.py": ["x", "x", null] },
  packages: {}, data: {}, metrics: {}, divergences: [], num_common: [5, 0],
  unknown: { data: ["c"] },
};

test("why two runs part is what differs between these two, not between any of them", () => {
  expect(differencesOf(comparison, "a", "b")).toEqual([{ part: "config", name: "hyperparams.lr", values: [0.1, 0.2] }]);
  expect(differencesOf(comparison, "a", "c").map(({ part, name }) => `${part} ${name}`)).toEqual(["config seed", "code model.py"]);
  expect(differencesOf(comparison, "a", "gone")).toEqual([]);
});

test("a part that is unknown for one of two runs is said, not taken as equal", () => {
  expect(unknownOf(comparison, ["a", "c"])).toEqual(["data"]);
  expect(unknownOf(comparison, ["a", "b"])).toEqual([]);
});

test("the jump to a step shows what is around it", () => {
  expect(zoomAtStep(1000)).toEqual([900, 1100]);
  expect(zoomAtStep(1)).toEqual([0, 11]);
});
