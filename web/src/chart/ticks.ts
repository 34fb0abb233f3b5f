/* Ticks of axes: where they are, and labels that are short and no finer than the distance between them. */

import type { Range } from "./axis";

export interface Tick {
  at: number;
  label: string;
}

/** At most so many ticks of 1, 2 or 5 times a power of ten. `least`: between two of them; 1 where there are whole numbers only. */
export function linearTicks([low, high]: Range, most: number, least = 0): Tick[] {
  const distance = Math.max(niceDistance((high - low) / Math.max(most, 1)), least);
  return every(distance, low, high).map((at) => ({ at, label: formatTick(at, distance) }));
}

/** The smallest of 1, 2 or 5 times a power of ten that is not below. */
export function niceDistance(least: number): number {
  const power = Math.pow(10, Math.floor(Math.log10(least)));
  return ([1, 2, 5].find((part) => part * power >= least * (1 - 1e-9)) ?? 10) * power;
}

/** Multiples of a distance. `shift`: where the first of them would be. */
function every(distance: number, low: number, high: number, shift = 0): number[] {
  const first = Math.ceil((low - shift) / distance - 1e-9);
  const last = Math.floor((high - shift) / distance + 1e-9);
  // Not by adding up: errors would add up, too.
  return Array.from({ length: Math.min(Math.max(last - first + 1, 0), 200) }, (_, i) => (first + i) * distance + shift);
}

/** Powers of ten; with few of them also 2 and 5 times these; within one power, linear ticks. */
export function logTicks([low, high]: Range, most: number): Tick[] {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (last - first < 1) return linearTicks([low, high], most).filter(({ at }) => at > 0);
  const by = Math.max(Math.ceil((last - first + 1) / Math.max(most, 1)), 1);
  const parts = (last - first + 1) * 3 <= most ? [1, 2, 5] : [1];
  const ticks: Tick[] = [];
  for (let power = first - 1; power <= last; power++) {
    if (power % by !== 0) continue;
    for (const part of parts) {
      const at = Number(`${part}e${power}`);
      if (at >= low && at <= high) ticks.push({ at, label: formatTick(at, at) });
    }
  }
  return ticks;
}

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;
/** Distances that people count time in, in seconds. */
const SPANS = [
  1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR,
  12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY,
];

function spanDistance(least: number): number {
  return least < 1 ? niceDistance(least) : (SPANS.find((span) => span >= least) ?? niceDistance(least / DAY) * DAY);
}

/** Of seconds since a start. */
export function spanTicks([low, high]: Range, most: number): Tick[] {
  const distance = spanDistance((high - low) / Math.max(most, 1));
  return every(distance, low, high).map((at) => ({ at, label: formatSpan(at, distance) }));
}

/** Of seconds since 1970, at round times of the reader's time zone. The date stands where a day begins. */
export function timeTicks([low, high]: Range, most: number): Tick[] {
  const distance = spanDistance((high - low) / Math.max(most, 1));
  const zone = new Date(low * 1000).getTimezoneOffset() * MINUTE;
  return every(distance, low, high, distance >= HOUR ? zone : 0).map((at) => ({ at, label: formatClock(at, distance) }));
}

const pad = (value: number): string => String(value).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

function formatClock(seconds: number, distance: number): string {
  const time = new Date(seconds * 1000);
  const [hours, minutes] = [time.getHours(), time.getMinutes()];
  if (distance >= DAY || (hours === 0 && minutes === 0 && time.getSeconds() === 0)) return `${time.getDate()} ${MONTHS[time.getMonth()]!}`;
  if (distance >= MINUTE) return `${pad(hours)}:${pad(minutes)}`;
  const rest = distance < 1 ? `.${String(time.getMilliseconds()).padStart(3, "0")}` : "";
  return `${pad(hours)}:${pad(minutes)}:${pad(time.getSeconds())}${rest}`;
}

const UNITS: readonly [number, number, string][] = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];

/** 1.5M, 20k, 1234, 0.05, 1e-7. `distance`: between two ticks. */
export function formatTick(value: number, distance: number): string {
  const size = Math.abs(value);
  if (size < distance * 1e-6) return "0";
  if (size < 1e-4 || size >= 1e15) {
    const digits = Math.min(Math.max(Math.ceil(Math.log10(size / distance) - 1e-9), 1), 9);
    return value.toExponential(digits).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  const [, scale, unit] = UNITS.find(([from, by]) => size >= from && digitsOf(distance / by) <= 3) ?? [0, 1, ""];
  return `${trimZeros((value / scale).toFixed(digitsOf(distance / scale)))}${unit}`;
}

/** Digits after the point that tell two values of that distance apart. */
const digitsOf = (distance: number): number => Math.min(Math.max(Math.ceil(-Math.log10(distance) - 1e-9), 0), 9);

function trimZeros(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Seconds as 0.5 s, 1:30, 2h, 2h30, 3d. */
export function formatSpan(seconds: number, distance: number): string {
  if (Math.abs(seconds) < distance * 1e-6) return "0";
  if (distance < 1) return `${trimZeros(seconds.toFixed(3))} s`;
  const whole = Math.round(seconds);
  if (distance >= DAY) return `${Math.round(whole / DAY)}d`;
  const hours = Math.floor(whole / HOUR);
  const minutes = Math.floor((whole % HOUR) / MINUTE);
  if (distance >= MINUTE && hours > 0) return minutes === 0 ? `${hours}h` : `${hours}h${pad(minutes)}`;
  if (distance >= MINUTE) return `${minutes} min`;
  if (hours > 0) return `${hours}:${pad(minutes)}:${pad(whole % MINUTE)}`;
  return minutes > 0 ? `${minutes}:${pad(whole % MINUTE)}` : `${whole} s`;
}
