/* Which checkpoint a fork starts from, and what of a config was changed. Pure. */

import type { Artifact } from "../types";

export interface ForkTarget {
  artifact: Artifact;
  step: number;
  /** The clicked step is before every checkpoint, so this is the first one. */
  isAfter: boolean;
}

/** The newest usable checkpoint at or before a step; where there is none, the first one after it. */
export function findTarget(artifacts: readonly Artifact[], step: number): ForkTarget | null {
  let before: Artifact | null = null;
  let after: Artifact | null = null;
  for (const artifact of artifacts) {
    if (artifact.kind !== "checkpoint" || !artifact.is_present) continue;
    if (artifact.step <= step) {
      if (before === null || isBetter(artifact, before, 1)) before = artifact;
    } else if (after === null || isBetter(artifact, after, -1)) after = artifact;
  }
  const found = before ?? after;
  return found === null ? null : { artifact: found, step: found.step, isAfter: before === null };
}

/** `direction` 1: the later step wins; of one step always the later attempt, which others were discarded for. */
function isBetter(one: Artifact, other: Artifact, direction: 1 | -1): boolean {
  const distance = (one.step - other.step) * direction;
  return distance > 0 || (distance === 0 && one.attempt > other.attempt);
}

export type Config = Record<string, unknown>;

/** Dotted names and values of what is no table. */
export function flatten(config: Config, prefix = ""): [string, unknown][] {
  return Object.entries(config).flatMap(([name, value]): [string, unknown][] =>
    isTable(value) && Object.keys(value).length > 0 ? flatten(value, `${prefix}${name}.`) : [[prefix + name, value]],
  );
}

/** Names of both configs in order, without those of tables that are empty here and have fields there. */
export function listNames(now: ReadonlyMap<string, unknown>, before: ReadonlyMap<string, unknown>): string[] {
  const all = [...new Set([...now.keys(), ...before.keys()])];
  const isEmptyTable = (name: string): boolean =>
    [now, before].some((one) => isTable(one.get(name))) && all.some((other) => other.startsWith(`${name}.`));
  return all.filter((name) => !isEmptyTable(name));
}

export const isTable = (value: unknown): value is Config =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** What a resume has to be told: the values that differ, as nested tables. A name that was removed becomes null. */
export function findOverrides(old: Config, changed: Config): Config {
  const overrides: Config = {};
  for (const name of new Set([...Object.keys(old), ...Object.keys(changed)])) {
    const [before, after] = [old[name], changed[name]];
    if (JSON.stringify(before) === JSON.stringify(after)) continue;
    overrides[name] = isTable(before) && isTable(after) ? findOverrides(before, after) : (after ?? null);
  }
  return overrides;
}

/** A config with the value at a dotted name changed. Names of the config itself may hold dots: the longest one wins. */
export function setValue(config: Config, path: string, value: unknown): Config {
  if (Object.hasOwn(config, path)) return { ...config, [path]: value };
  for (const name of Object.keys(config).sort((a, b) => b.length - a.length)) {
    const child = config[name];
    if (path.startsWith(`${name}.`) && isTable(child)) {
      return { ...config, [name]: setValue(child, path.slice(name.length + 1), value) };
    }
  }
  return { ...config, [path]: value };
}

/** What was typed: JSON where it is JSON, else text; text stays text where the old value was text. */
export function parseValue(text: string, old: unknown): unknown {
  if (typeof old === "string") return text;
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return text;
  }
}
