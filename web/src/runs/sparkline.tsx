/* A curve without axes, as wide as a word or two. */

import type { Run } from "../types";
import { trendOf } from "./trends";

const WIDTH = 96;
const HEIGHT = 22;

/** The path of a curve within a box; "" where there is nothing to draw. */
export function drawPath(points: readonly (readonly [number, number])[], width: number, height: number): string {
  const first = points[0];
  const last = points.at(-1);
  if (first === undefined || last === undefined || points.length < 2) return "";
  let low = Infinity;
  let high = -Infinity;
  for (const [, value] of points) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const spanX = last[0] - first[0] || 1;
  const spanY = high - low || 1;
  return points
    .map(([x, y], index) => {
      const left = (1 + ((x - first[0]) / spanX) * (width - 2)).toFixed(1);
      const top = (high === low ? height / 2 : 2 + ((high - y) / spanY) * (height - 4)).toFixed(1);
      return `${index === 0 ? "M" : "L"}${left} ${top}`;
    })
    .join("");
}

export function Sparkline({ run }: { run: Run }) {
  const trend = trendOf(run.run_id);
  const path = trend === undefined ? "" : drawPath(trend.points, WIDTH, HEIGHT);
  if (trend === undefined || path === "") return null;
  return (
    <svg class="spark" width={WIDTH} height={HEIGHT} viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Curve of ${trend.name}`}>
      <title>{trend.name}</title>
      <path d={path} />
    </svg>
  );
}
