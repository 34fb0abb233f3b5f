/* Colours of curves and of the canvas, from the tokens of the theme. */

import { isDark, readColour } from "../theme";
import type { Palette } from "./paint";

const NUM_TOKENS = 8;

/** As CSS: works in styles. The first eight are tokens of the theme, more are spread over the colour circle. */
export function lineColour(index: number): string {
  if (index < NUM_TOKENS) return `var(--line-${index + 1})`;
  const hue = Math.round((index * 137.508) % 360);
  return `light-dark(hsl(${hue} 60% 38%), hsl(${hue} 65% 68%))`;
}

/** As a canvas takes it. Ask again when `colourVersion` changes. */
export function canvasColour(index: number): string {
  if (index < NUM_TOKENS) return readColour(`--line-${index + 1}`);
  const hue = Math.round((index * 137.508) % 360);
  return isDark() ? `hsl(${hue} 65% 68%)` : `hsl(${hue} 60% 38%)`;
}

export function readPalette(): Palette {
  return {
    text: readColour("--text"),
    muted: readColour("--muted"),
    grid: readColour("--border"),
    bad: readColour("--bad"),
    good: readColour("--good"),
    accent: readColour("--warn"),
    surface: readColour("--surface"),
  };
}
