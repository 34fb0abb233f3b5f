/* A job as a document: values at paths, text of a field to a value and back, faults at their fields. */

import type { Fault } from "../types";
import type { Document, FieldKind, Json } from "./schema";

export const isObject = (value: Json | undefined): value is Document =>
  typeof value === "object" && value !== null && !Array.isArray(value);

export function getAt(document: Document, path: string): Json | undefined {
  return path.split(".").reduce<Json | undefined>((value, name) => (isObject(value) ? value[name] : undefined), document);
}

/** A copy with one value changed; undefined removes it, and with it objects that become empty. */
export function setAt(document: Document, path: string, value: Json | undefined): Document {
  const [name = "", ...rest] = path.split(".");
  const old = document[name];
  const next = rest.length === 0 ? value : setAt(isObject(old) ? old : {}, rest.join("."), value);
  const copy = { ...document };
  if (next === undefined || (rest.length > 0 && isObject(next) && Object.keys(next).length === 0)) delete copy[name];
  else copy[name] = next;
  return copy;
}

/** JSON where it is JSON, else text: 3 is a number, cuda:0 is text, ["a"] is a list. */
export function readValue(text: string): Json {
  try {
    return JSON.parse(text) as Json;
  } catch {
    return text;
  }
}

const PAIR = /^([^:=]+?)\s*[:=]\s*(.*)$/;

/** What was typed into a field, as a value of the job. Empty text is no value. What cannot be read is sent as it is. */
export function parseText(kind: FieldKind, text: string): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  switch (kind) {
    case "number": return Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed;
    case "boolean": return trimmed === "true";
    case "lines": return trimmed.split("\n").map((line) => line.trim()).filter((line) => line !== "");
    case "pairs": {
      if (trimmed.startsWith("{")) return readValue(trimmed);
      const lines = trimmed.split("\n").map((line) => line.trim()).filter((line) => line !== "");
      return Object.fromEntries(lines.map((line) => {
        const [, name = line, value = ""] = PAIR.exec(line) ?? [];
        return [name.trim(), value === "" ? "" : readValue(value)];
      }));
    }
    case "value": return readValue(trimmed);
    default: return text;
  }
}

/** The other way: the text that a field shows. */
export function showText(kind: FieldKind, value: Json | undefined): string {
  if (value === undefined || value === null) return "";
  if (kind === "lines" && Array.isArray(value)) return value.map((one) => (typeof one === "string" ? one : JSON.stringify(one))).join("\n");
  if (kind === "pairs" && isObject(value)) {
    return Object.entries(value).map(([name, one]) => `${name}: ${showValue(one)}`).join("\n");
  }
  return showValue(value);
}

/** Text that would be read as something else keeps its quotes. */
const showValue = (value: Json): string => (typeof value === "string" && readValue(value) === value ? value : JSON.stringify(value));

/** What turns one job into another: changed values, null for those that are gone. Objects are merged, lists replaced. */
export function diffDocuments(old: Document, changed: Document): Document {
  const result: Document = {};
  for (const name of new Set([...Object.keys(old), ...Object.keys(changed)])) {
    const before = old[name];
    const after = changed[name];
    if (after === undefined) {
      if (before !== null) result[name] = null;
    } else if (isObject(before) && isObject(after)) {
      const inner = diffDocuments(before, after);
      if (Object.keys(inner).length > 0) result[name] = inner;
    } else if (JSON.stringify(before) !== JSON.stringify(after)) {
      result[name] = after;
    }
  }
  return result;
}

/** Faults by the field that they are shown at: the deepest one on their path. "" has those that no field has. */
export function sortFaults(faults: readonly Fault[], paths: readonly string[]): Map<string, string[]> {
  const known = new Set(paths);
  const sorted = new Map<string, string[]>();
  for (const fault of faults) {
    let place = fault.path.replace(/\[[^\]]*\]/g, "");
    while (place !== "" && !known.has(place)) place = place.includes(".") ? place.slice(0, place.lastIndexOf(".")) : "";
    const prefix = `${fault.path}: `;
    const text = place !== "" && fault.path === place && fault.text.startsWith(prefix) ? fault.text.slice(prefix.length) : fault.text;
    sorted.set(place, [...(sorted.get(place) ?? []), text]);
  }
  return sorted;
}
