/* What the gateway says of several runs, and what differs between two of them. Pure. */

import { formatPlural } from "../format";
import type { Num } from "../types";

export type Values = Record<string, unknown[]>;

export interface Divergence {
  runs: [string, string];
  metric: string;
  step: number;
  values: [Num, Num];
  /** Steps before it that both have, with the same value. */
  num_equal: number;
}

/** Only what differs; values are in the order of the runs, null where a run does not have it. */
export interface Comparison {
  runs: string[];
  config: Values;
  code: Values;
  packages: Values;
  data: Values;
  /** All of them: the last value. */
  metrics: Record<string, (Num | null)[]>;
  /** Of each run and the first. */
  divergences: Divergence[];
  num_common: number[];
  /** Part -> runs for which it is not known. */
  unknown: Record<string, string[]>;
}

export const PARTS = ["config", "code", "packages", "data"] as const;
export type Part = (typeof PARTS)[number];

export interface Difference {
  part: Part;
  name: string;
  values: [unknown, unknown];
}

/** What differs between two of the runs. */
export function differencesOf(comparison: Comparison, one: string, other: string): Difference[] {
  const [a, b] = [comparison.runs.indexOf(one), comparison.runs.indexOf(other)];
  if (a < 0 || b < 0) return [];
  return PARTS.flatMap((part) =>
    Object.entries(comparison[part])
      .map(([name, values]): Difference => ({ part, name, values: [values[a] ?? null, values[b] ?? null] }))
      .filter(({ values }) => JSON.stringify(values[0]) !== JSON.stringify(values[1]))
      .sort((one, other) => numMissing(one) - numMissing(other)), // what both have explains more than what one has
  );
}

const numMissing = ({ values }: Difference): number => values.filter((value) => value === null).length;

/** Parts that are not known of one of the two, so that nothing can be said about them. */
export const unknownOf = (comparison: Comparison, runs: readonly string[]): string[] =>
  Object.entries(comparison.unknown).filter(([, ids]) => ids.some((id) => runs.includes(id))).map(([part]) => part);

/** The range of steps to show around the one at which two curves part. */
export function zoomAtStep(step: number): [number, number] {
  const room = Math.max(Math.round(step * 0.1), 10);
  return [Math.max(step - room, 0), step + room];
}

const MAX_SHOWN = 200; // characters of a value in a table

/** A long value is cut: the run's own view has all of it. */
export function showValue(value: unknown): string {
  const text = value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
  if (text.length <= MAX_SHOWN) return text;
  return `${text.slice(0, MAX_SHOWN)}… (${Array.isArray(value) ? formatPlural(value.length, "value") : formatPlural(text.length, "character")})`;
}
