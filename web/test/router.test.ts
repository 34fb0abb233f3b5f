import { describe, expect, test } from "vitest";

import { apiUrl, encodeParams, takeToken } from "../src/api";
import { changeQuery, compareUrl, matchRoute, runUrl } from "../src/router";

describe("routes", () => {
  test.each([
    ["/", { view: "runs" }], ["/runs", { view: "runs" }], ["/machine", { view: "machine" }], ["/submit/", { view: "submit" }],
    ["/compare", { view: "compare" }], ["/runs/a.2", { view: "run", runId: "a.2" }], ["/runs/a%2Fb", { view: "run", runId: "a/b" }],
    ["/runs/a/b", { view: "missing" }], ["/runs/%E0%A4%A", { view: "missing" }], ["/nothing", { view: "missing" }],
  ])("%s", (path, route) => expect(matchRoute(path)).toEqual(route));

  test("a link to a run leads back to it, whatever its name", () => {
    const id = "ä /?#%.2";
    expect(matchRoute(runUrl(id))).toEqual({ view: "run", runId: id });
  });

  test("a link to a comparison names its runs", () =>
    expect(new URLSearchParams(compareUrl(["a", "b&c"]).split("?")[1]).getAll("run")).toEqual(["a", "b&c"]));
});

describe("query", () => {
  test("a change keeps the rest, and names are sorted", () =>
    expect(changeQuery(new URLSearchParams("sort=run&a=1"), { q: "x", state: ["B", "A"] }).toString()).toBe("a=1&q=x&sort=run&state=B&state=A"));
  test("null, empty text and empty lists remove a name", () =>
    expect(changeQuery(new URLSearchParams("a=1&b=2&c=3&c=4&d=5"), { a: null, b: "", c: [] }).toString()).toBe("d=5"));
});

describe("addresses of the API", () => {
  test("every part of a path is encoded", () => expect(apiUrl(["runs", "../x?y"])).toBe("/api/v1/runs/..%2Fx%3Fy"));
  test("lists repeat their name; true is 1; what is not given is left out", () =>
    expect(encodeParams({ run: ["a", "b"], dry_run: true, limit: null, page_token: undefined })).toBe("?run=a&run=b&dry_run=1"));
});

test("a login token leaves the address before anything else happens", () => {
  const seen: string[] = [];
  const place = { hash: "#token=abc", pathname: "/runs/a", search: "?x=1" } as Location;
  const past = { state: null, replaceState: (_: unknown, __: string, url: string) => seen.push(url) } as unknown as History;
  expect(takeToken(place, past)).toBe("abc");
  expect(seen).toEqual(["/runs/a?x=1"]);
  expect(takeToken({ hash: "#other", pathname: "/", search: "" } as Location, past)).toBeNull();
});
