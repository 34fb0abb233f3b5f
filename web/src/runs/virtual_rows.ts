/* Which rows of a long list are in view, where rows differ in height. */

/** Where each row begins, and at the end where the last one ends. */
export function measureRows(heights: Iterable<number>): number[] {
  const tops = [0];
  let top = 0;
  for (const height of heights) tops.push((top += height));
  return tops;
}

/** The row at a distance from the top: the last one that begins at or before it. */
export function findRow(tops: readonly number[], at: number): number {
  let low = 0;
  let high = Math.max(0, tops.length - 2);
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if ((tops[middle] ?? 0) <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}
