import { expect, test } from "vitest";

import { withDescendants } from "../src/actions/descent";

const run = (run_id: string, parent_run_id = "") => ({ run_id, parent_run_id });

test("with a run go all that continue it, each once, and no others", () => {
  const all = [run("a"), run("b", "a"), run("c", "b"), run("d", "a"), run("other")];
  const ids = (...picked: string[]) => withDescendants(all.filter(({ run_id }) => picked.includes(run_id)), all).map(({ run_id }) => run_id);
  expect(ids("a")).toEqual(["a", "b", "d", "c"]);
  expect(ids("b", "a")).toEqual(["a", "b", "d", "c"]);
  expect(ids("c")).toEqual(["c"]);
  expect(ids("other")).toEqual(["other"]);
});
