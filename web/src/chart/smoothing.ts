/* Exponential moving average over the raw line. The weight of the past falls with the distance on the x axis, not with
   the number of points, so a curve looks the same in coarse and in fine buckets. */

/** Distances are measured in this part of the visible range: a weight of 0.9 means 0.9 per thousandth of the range. */
const PARTS = 1000;

/**
 * `weight`: 0 (the raw line) up to, not including, 1. `span`: the visible range of x.
 * Values that are not finite stay as they are, and the average continues after them.
 */
export function smooth(xs: ArrayLike<number>, values: readonly number[], weight: number, span: number): number[] {
  if (weight <= 0 || values.length === 0) return values.slice();
  const factor = span > 0 ? PARTS / span : 0;
  const result: number[] = new Array(values.length);
  let average = 0;
  let mass = 0; // what the average"s weights add up to: without it the first points would count too little
  let previous = xs.length > 1 ? 2 * xs[0]! - xs[1]! : xs[0]!;
  for (let i = 0; i < values.length; i++) {
    const value = values[i]!;
    if (!Number.isFinite(value)) {
      result[i] = value;
      continue;
    }
    const past = Math.pow(weight, Math.max((xs[i]! - previous) * factor, MIN_DISTANCE));
    average = average * past + value * (1 - past);
    mass = mass * past + (1 - past);
    result[i] = average / mass;
    previous = xs[i]!;
  }
  return result;
}

/** Of points at the same place. */
const MIN_DISTANCE = 1e-6;
