/* Labels of axes: short, and no finer than the distance between ticks. */

const UNITS: readonly [number, string][] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];

/** 1.5M, 20k, 1234, 0.05, 1e-7. `distance`: between two ticks. */
export function formatTick(value: number, distance: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e15) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  const unit = UNITS.find(([from]) => size >= from);
  const scale = unit === undefined ? 1 : unit[1] === "k" ? 1e3 : unit[0];
  const digits = Math.min(Math.max(Math.ceil(-Math.log10(Math.abs(distance) / scale || 1) - 1e-9), 0), 6);
  return `${trimZeros((value / scale).toFixed(digits))}${unit?.[1] ?? ""}`;
}

/** Of a log axis: every tick has its own size. */
export const formatLogTick = (value: number): string => formatTick(value, Math.pow(10, Math.floor(Math.log10(Math.abs(value)))));

function trimZeros(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const pad = (value: number): string => String(value).padStart(2, "0");

/** Seconds as 0.5 s, 1:30, 2h, 2h30, 3d. */
export function formatSpanTick(seconds: number, distance: number): string {
  if (seconds === 0) return "0";
  if (distance < 1) return `${trimZeros(seconds.toFixed(3))} s`;
  const whole = Math.round(seconds);
  if (distance >= 86_400) return `${Math.round(whole / 86_400)}d`;
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (distance >= 60 && hours > 0) return minutes === 0 ? `${hours}h` : `${hours}h${pad(minutes)}`;
  if (distance >= 60) return `${minutes} min`;
  if (hours > 0) return `${hours}:${pad(minutes)}:${pad(whole % 60)}`;
  return minutes > 0 ? `${minutes}:${pad(whole % 60)}` : `${whole} s`;
}

/** Distances between ticks of a time axis that people count in. */
export const SPAN_DISTANCES: number[] = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000, 2_592_000, 8_640_000, 31_536_000,
];
