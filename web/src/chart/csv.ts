/* Curves as rows: one row per step, one column per curve. For export and for the table beside a chart. */

import type { Curve } from "./curve";

export interface Column {
  label: string;
  curve: Curve;
}

export interface Row {
  step: number;
  /** One for each column; undefined: this curve has no point there. */
  values: (number | undefined)[];
}

/** Rows by step, ascending. Curves that share a grid share rows. */
export function alignRows(columns: readonly Column[]): Row[] {
  const rows = new Map<number, Row>();
  columns.forEach(({ curve }, column) => {
    curve.steps.forEach((step, i) => {
      let row = rows.get(step);
      if (row === undefined) {
        row = { step, values: new Array<number | undefined>(columns.length).fill(undefined) };
        rows.set(step, row);
      }
      row.values[column] = curve.values[i];
    });
  });
  return [...rows.values()].sort((a, b) => a.step - b.step);
}

/** At most `count` of the rows, evenly spread, with the first and the last. */
export function pickRows(rows: readonly Row[], count: number): Row[] {
  if (rows.length <= count || count < 2) return rows.slice();
  return Array.from({ length: count }, (_, i) => rows[Math.round((i * (rows.length - 1)) / (count - 1))]!);
}

/** With min and max of each bucket where a curve is bucketed. Non-finite values are `NaN`, `Infinity`, `-Infinity`. */
export function toCsv(columns: readonly Column[]): string {
  const head = ["step"];
  for (const { label, curve } of columns) {
    head.push(label);
    if (curve.width > 1) head.push(`${label} min`, `${label} max`);
  }
  const places = columns.map(({ curve }) => new Map(curve.steps.map((step, i) => [step, i])));
  const lines = [head.map(quote).join(",")];
  for (const { step } of alignRows(columns)) {
    const cells = [String(step)];
    columns.forEach(({ curve }, column) => {
      const i = places[column]!.get(step);
      const wanted = curve.width > 1 ? [curve.values, curve.mins, curve.maxs] : [curve.values];
      cells.push(...wanted.map((values) => (i === undefined ? "" : String(values[i]))));
    });
    lines.push(cells.join(","));
  }
  return lines.join("\r\n") + "\r\n";
}

/** A text that a spreadsheet takes as text: quoted where needed, and no formula. */
function quote(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
