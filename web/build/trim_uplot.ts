/* uPlot has parts that this page never calls. They hang on its default export, so a bundler cannot drop them by itself. */

import type { Plugin } from "vite";

/** What is cut out of `uPlot.esm.js`. Each must be there: another version of uPlot stops the build. */
const CUTS: readonly (readonly [string, string])[] = [
  ["const FEAT_TIME          = true;", "const FEAT_TIME = false;"], // the page formats times itself
  ["	uPlot.fmtDate = fmtDate;", ""],
  ["	uPlot.tzDate  = tzDate;", ""],
  ["	uPlot.join = join;", ""],
  ["	(paths.stepped = stepped);", ""],
  ["	(paths.bars    = bars);", ""],
  ["	(paths.spline  = monotoneCubic);", ""],
];

export function trimUplot(): Plugin {
  return {
    name: "trim-uplot",
    transform(code, id) {
      if (!id.endsWith("uPlot.esm.js")) return null;
      for (const [text] of CUTS) if (!code.includes(text)) throw new Error(`uPlot has changed: there is no \`${text.trim()}\``);
      return { code: CUTS.reduce((rest, [text, instead]) => rest.replace(text, instead), code), map: null };
    },
  };
}
