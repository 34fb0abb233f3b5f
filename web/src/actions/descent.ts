/* Which runs depend on which: a run starts from a checkpoint of its parent. Pure. */

import type { Run } from "../types";

type Child = Pick<Run, "run_id" | "parent_run_id">;

/** These runs, and after them all that continue them: those have no beginning without them. */
export function withDescendants<T extends Child>(picked: readonly T[], all: Iterable<T>): T[] {
  const children = new Map<string, T[]>();
  for (const run of all) children.set(run.parent_run_id, [...(children.get(run.parent_run_id) ?? []), run]);
  const found = new Map(picked.map((run) => [run.run_id, run]));
  for (const { run_id: id } of found.values()) { // a map also gives what is added meanwhile
    for (const child of children.get(id) ?? []) if (!found.has(child.run_id)) found.set(child.run_id, child);
  }
  return [...found.values()];
}
