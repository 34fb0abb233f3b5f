/* Exports: a PNG with title and legend, and files that the browser saves. */

import type { Palette } from "./paint";

export interface LegendEntry {
  label: string;
  colour: string;
}

const ROW = 20;
const MARGIN = 16;

/** A picture of a chart's canvas with its title above and its legend below. */
export function drawPicture(
  chart: HTMLCanvasElement, title: string, legend: readonly LegendEntry[], palette: Palette, ratio: number,
): HTMLCanvasElement {
  const picture = document.createElement("canvas");
  const ctx = picture.getContext("2d")!;
  const width = chart.width / ratio;
  const font = `13px ${getComputedStyle(document.body).fontFamily}`;
  ctx.font = font;
  const places = layOut(legend.map(({ label }) => ctx.measureText(label).width), width);
  const numRows = (places.at(-1)?.row ?? -1) + 1;
  picture.width = chart.width + 2 * MARGIN * ratio;
  picture.height = chart.height + (2 * MARGIN + ROW + 8 + numRows * ROW) * ratio;
  ctx.scale(ratio, ratio);
  ctx.fillStyle = palette.surface;
  ctx.fillRect(0, 0, picture.width, picture.height);
  ctx.textBaseline = "middle";
  ctx.fillStyle = palette.text;
  ctx.font = `600 ${font}`;
  ctx.fillText(title, MARGIN, MARGIN + ROW / 2, width);
  ctx.drawImage(chart, MARGIN, MARGIN + ROW + 4, width, chart.height / ratio);
  ctx.font = font;
  const top = MARGIN + ROW + 8 + chart.height / ratio;
  legend.forEach(({ label, colour }, i) => {
    const { x, row } = places[i]!;
    const y = top + row * ROW + ROW / 2;
    ctx.fillStyle = colour;
    ctx.fillRect(MARGIN + x, y - 2, 14, 4);
    ctx.fillStyle = palette.text;
    ctx.fillText(label, MARGIN + x + 20, y);
  });
  return picture;
}

/** Entries of a legend in rows. */
export function layOut(widths: readonly number[], room: number): { x: number; row: number }[] {
  let x = 0;
  let row = 0;
  return widths.map((width) => {
    const own = width + 40;
    if (x > 0 && x + own > room) {
      x = 0;
      row += 1;
    }
    const place = { x, row };
    x += own;
    return place;
  });
}

export function saveCanvas(canvas: HTMLCanvasElement, name: string): void {
  canvas.toBlob((blob) => {
    if (blob !== null) saveBlob(blob, name);
  }, "image/png");
}

export function saveText(text: string, name: string, type: string): void {
  saveBlob(new Blob([text], { type }), name);
}

function saveBlob(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
