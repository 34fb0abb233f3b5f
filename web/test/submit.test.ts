import { describe, expect, test } from "vitest";

import { diffDocuments, getAt, parseText, setAt, showText, sortFaults } from "../src/submit/document";
import { listPaths, readForm, splitForm } from "../src/submit/schema";

const SCHEMA = {
  $ref: "#/$defs/Job",
  $defs: {
    Job: {
      type: "object",
      required: ["run_id"],
      properties: {
        run_id: { type: "string", description: "a name" },
        max_steps: { anyOf: [{ type: "integer" }, { type: "null" }], default: null },
        validate_every: { anyOf: [{ type: "integer" }, { enum: ["epoch"] }], default: 0 },
        precision: { enum: ["fp32", "bf16"], default: "fp32" },
        strict: { type: "boolean", default: false },
        hyperparams: { type: "object", default: {} },
        dataset: { anyOf: [{ $ref: "#/$defs/Data" }, { type: "null" }], default: null },
        serving: { anyOf: [{ $ref: "#/$defs/Data" }, { type: "null" }], default: null },
        mock_batches: { anyOf: [{ type: "array" }, { type: "null" }], default: null },
      },
    },
    Data: {
      type: "object",
      properties: { parquet_paths: { type: "array", items: { type: "string" } }, batch_size: { type: "integer", default: 32 } },
    },
  },
};

describe("the form", () => {
  const form = readForm(SCHEMA);
  test("has a fitting kind of field for each type", () =>
    expect(Object.fromEntries(form.map((field) => [field.name, field.kind]))).toEqual({
      run_id: "text", max_steps: "number", validate_every: "value", precision: "choice", strict: "boolean", hyperparams: "pairs",
      dataset: "group", serving: "group", mock_batches: "value",
    }));
  test("has groups for objects inside", () =>
    expect(listPaths(form).filter((path) => path.startsWith("dataset"))).toEqual(["dataset", "dataset.parquet_paths", "dataset.batch_size"]));
  test("of a server begins with what it serves, and no training job is asked for that", () => {
    const first = (job: Record<string, never | string | object>): string[] => splitForm(form, job as never).first.map(({ name }) => name);
    expect(first({ mode: "inference", serving: {} })).toEqual(["run_id", "serving"]);
    expect(first({})).not.toContain("serving");
  });
  test("knows what is required, the default and the meaning", () => {
    expect(form[0]).toMatchObject({ isRequired: true, about: "a name" });
    expect(form[6]!.fields[1]).toMatchObject({ fallback: 32, kind: "number" });
  });
  test("shows first what most jobs give", () => {
    const { first, rest } = splitForm(form);
    expect(first.map((field) => field.name)).toEqual(["run_id", "max_steps", "hyperparams", "dataset", "validate_every"]);
    expect(rest.map((field) => field.name)).toEqual(["precision", "strict", "serving", "mock_batches"]);
  });
});

describe("values at paths", () => {
  test("are set without changing the old document", () => {
    const old = { dataset: { batch_size: 4 } };
    expect(setAt(old, "dataset.shuffle", true)).toEqual({ dataset: { batch_size: 4, shuffle: true } });
    expect(old).toEqual({ dataset: { batch_size: 4 } });
  });
  test("that are gone take empty objects with them", () => expect(setAt({ dataset: { batch_size: 4 } }, "dataset.batch_size", undefined)).toEqual({}));
  test("replace what is no object", () => expect(setAt({ dataset: 5 }, "dataset.batch_size", 1)).toEqual({ dataset: { batch_size: 1 } }));
  test("that are not there are undefined", () => expect(getAt({ a: 1 }, "a.b.c")).toBeUndefined());
});

describe("text of a field", () => {
  test.each([
    ["number", "10", 10], ["number", "1e-4", 0.0001], ["number", "ten", "ten"], ["text", "5", "5"], ["boolean", "false", false],
    ["lines", " a \n\nb", ["a", "b"]], ["value", "epoch", "epoch"], ["value", "[1, 2]", [1, 2]], ["value", "3", 3],
    ["pairs", "lr: 1e-3\nname = x y\nflag: true\nlayers: [1, 2]\nurl: http://a:1", { lr: 0.001, name: "x y", flag: true, layers: [1, 2], url: "http://a:1" }],
    ["pairs", '{"a": 1}', { a: 1 }], ["pairs", "half", { half: "" }], ["number", "  ", undefined],
  ] as const)("%s %j", (kind, text, value) => expect(parseText(kind, text)).toEqual(value));

  test.each([
    ["pairs", { lr: 0.1, name: "x", version: "3", nested: { a: [1] } }], ["lines", ["a", "b"]], ["value", "epoch"], ["value", "3"], ["number", 0.5],
  ] as const)("what is shown is read as the same value: %s %j", (kind, value) =>
    expect(parseText(kind, showText(kind, value as never))).toEqual(value));
});

test("what changes a job: values, null for those that are gone, objects inside merged", () =>
  expect(diffDocuments({ a: 1, b: { c: 1, d: 2 }, e: [1], f: 1 }, { a: 1, b: { c: 1, d: 3 }, e: [1, 2], g: "new" }))
    .toEqual({ b: { d: 3 }, e: [1, 2], f: null, g: "new" }));

test("faults stand at the deepest field on their path, without repeating it", () => {
  const fault = (path: string, text: string) => ({ path, kind: "value", text, found: "", expected: "", hint: "" });
  const sorted = sortFaults(
    [fault("max_steps", "max_steps: found -1"), fault("dataset.parquet_paths[0]", "dataset.parquet_paths[0]: no such file"), fault("dataset.nope", "dataset.nope: unknown field"), fault("", "no trainer")],
    ["max_steps", "dataset", "dataset.parquet_paths"],
  );
  expect(Object.fromEntries(sorted)).toEqual({
    max_steps: ["found -1"], "dataset.parquet_paths": ["dataset.parquet_paths[0]: no such file"], dataset: ["dataset.nope: unknown field"], "": ["no trainer"],
  });
});
