/* Which columns the table has: those in the link, else those last chosen in this browser, else the default. */

import { computed, signal } from "@preact/signals";

import { keep, recall } from "../kept";
import { query, setQuery } from "../router";
import { DEFAULT_COLUMNS, findColumns } from "./columns";

const KEY = "trn.columns";

const kept = signal(recall(KEY));

const split = (text: string | null): string[] => (text ?? "").split(",").filter((key) => key !== "").map(decodeURIComponent);

/** Keys in the order of the columns. Names of metrics may hold commas, so each key is encoded. */
export const columnKeys = computed<readonly string[]>(() => {
  const asked = split(query.value.get("cols"));
  if (asked.length > 0) return asked;
  const last = split(kept.value);
  return last.length > 0 ? last : DEFAULT_COLUMNS;
});

export const chosenColumns = computed(() => {
  const found = findColumns(columnKeys.value);
  return found.length > 0 ? found : findColumns(DEFAULT_COLUMNS);
});

export function chooseColumns(keys: readonly string[]): void {
  const text = keys.map(encodeURIComponent).join(",");
  const isDefault = keys.join() === DEFAULT_COLUMNS.join();
  keep(KEY, isDefault ? null : text);
  kept.value = isDefault ? null : text;
  setQuery({ cols: isDefault ? null : text });
}

/** Adds a column at its usual place, or takes it away. The name of a run always stays. */
export function toggleColumn(keys: readonly string[], key: string, order: readonly string[]): string[] {
  if (keys.includes(key)) return key === "run" ? [...keys] : keys.filter((one) => one !== key);
  const place = (one: string): number => (order.includes(one) ? order.indexOf(one) : order.indexOf("metrics") + 0.5);
  const after = keys.findLastIndex((one) => place(one) <= place(key));
  return [...keys.slice(0, after + 1), key, ...keys.slice(after + 1)];
}
