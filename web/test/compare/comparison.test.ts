import { expect, test } from "vitest";

import { type Comparison, differencesOf, showValue, unknownOf, zoomAtStep } from "../../src/compare/comparison";

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

test("what both runs have comes before what only one has", () => {
  const code = { "a.txt": [null, "1", null], "model.py": ["x", "y", "x"], "z.txt": ["2", null, "2"] };
  expect(differencesOf({ ...comparison, config: {}, code }, "a", "b").map(({ name }) => name)).toEqual(["model.py", "a.txt", "z.txt"]);
});

test("a value of thousands of characters does not fill the table", () => {
  expect(showValue([1, 2])).toBe("[1,2]");
  expect(showValue(Array.from({ length: 2000 }, (_, i) => i))).toMatch(/^\[0,1,2,.{190,200}… \(2,000 values\)$/);
  expect(showValue("x".repeat(5000))).toMatch(/^x{200}… \(5,000 characters\)$/);
});
