/* How charts are shown, as it is kept in the link: x axis, log scales, smoothing, zoom, search. */

import { type Range, X_KINDS, type XKind } from "./axis";
import type { QueryChange } from "../router";

export interface ChartState {
  kind: XKind;
  /** Where `kind` is that. */
  xMetric: string;
  isLogX: boolean;
  isLogY: boolean;
  /** Metrics whose x or y scale is the other one than that for all: `x name` or `y name`. */
  flipped: readonly string[];
  smoothing: number;
  zoom: Range | null;
  search: string;
  hidden: readonly string[];
  withParents: boolean;
  /** The metric whose chart is shown in full width. */
  large: string;
}

export const MAX_SMOOTHING = 0.99;
const METRIC = "m:"; // before the name of a metric

/** Whether an axis of a chart is logarithmic: as for all, unless it was flipped for this one. */
export function isLog(state: ChartState, axis: "x" | "y", name: string): boolean {
  return (axis === "x" ? state.isLogX : state.isLogY) !== state.flipped.includes(`${axis} ${name}`);
}

/** The flips without those of one axis: a change for all charts is one for all of them. */
export const withoutFlips = (state: ChartState, axis: "x" | "y"): string[] => state.flipped.filter((one) => !one.startsWith(`${axis} `));

export function readState(query: URLSearchParams): ChartState {
  const x = query.get("x") ?? "step";
  const xMetric = x.startsWith(METRIC) ? x.slice(METRIC.length) : "";
  const smoothing = Number(query.get("smooth") ?? 0);
  return {
    kind: xMetric !== "" ? "metric" : (X_KINDS.find((kind) => kind === x) ?? "step"),
    xMetric,
    isLogX: query.get("logx") === "1",
    isLogY: query.get("logy") === "1",
    flipped: query.getAll("flip"),
    smoothing: smoothing > 0 ? Math.min(smoothing, MAX_SMOOTHING) : 0,
    zoom: readZoom(query.get("zoom")),
    search: query.get("find") ?? "",
    hidden: query.getAll("fold"),
    withParents: query.get("parents") === "1",
    large: query.get("large") ?? "",
  };
}

/** `low~high`, in units of the x axis. */
function readZoom(text: string | null): Range | null {
  const [low, high] = (text ?? "").split("~").map(Number);
  return low !== undefined && high !== undefined && low < high && Number.isFinite(low) && Number.isFinite(high)
    ? [low, high]
    : null;
}

export function writeState(change: Partial<ChartState>): QueryChange {
  const query: QueryChange = {};
  if (change.kind !== undefined) {
    query["x"] = change.kind === "step" ? null : change.kind === "metric" ? METRIC + (change.xMetric ?? "") : change.kind;
  }
  if (change.isLogX !== undefined) query["logx"] = change.isLogX ? "1" : null;
  if (change.isLogY !== undefined) query["logy"] = change.isLogY ? "1" : null;
  if (change.flipped !== undefined) query["flip"] = change.flipped;
  if (change.smoothing !== undefined) query["smooth"] = change.smoothing > 0 ? String(change.smoothing) : null;
  if (change.zoom !== undefined) query["zoom"] = change.zoom === null ? null : change.zoom.map(shorten).join("~");
  if (change.search !== undefined) query["find"] = change.search;
  if (change.hidden !== undefined) query["fold"] = change.hidden;
  if (change.withParents !== undefined) query["parents"] = change.withParents ? "1" : null;
  if (change.large !== undefined) query["large"] = change.large;
  return query;
}

const shorten = (value: number): string => String(Number(value.toPrecision(10)));

export interface MetricGroup {
  prefix: string;
  names: string[];
}

/** Metrics by what stands before their first slash, sorted; `train` and `val` first: that is what people look for. */
export function groupMetrics(names: Iterable<string>, search: string): MetricGroup[] {
  const words = search.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const groups = new Map<string, string[]>();
  for (const name of names) {
    if (!words.every((word) => name.toLowerCase().includes(word))) continue;
    const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  const rank = (prefix: string): number => {
    const place = FIRST.indexOf(prefix);
    return place < 0 ? FIRST.length : place;
  };
  return [...groups]
    .map(([prefix, own]) => ({ prefix, names: own.sort((a, b) => a.localeCompare(b, "en", { numeric: true })) }))
    .sort((a, b) => rank(a.prefix) - rank(b.prefix) || a.prefix.localeCompare(b.prefix, "en"));
}

const FIRST = ["train", "", "val", "eval", "test"];
