/* Numbers, durations, sizes and times as text for people. */

import { machineNow } from "./clock";
import type { Num } from "./types";
import { toNumber } from "./types";

const DIGITS = 4;

/** Four significant digits; very large and very small numbers as 1.234e-7. */
export function formatNumber(value: Num | null | undefined, digits = DIGITS): string {
  if (value === null || value === undefined) return "";
  const number = toNumber(value);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-4) return sign(number.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e"));
  if (Number.isInteger(number) || size >= 10 ** (digits - 1)) return sign(formatCount(number));
  return sign(String(Number(number.toPrecision(digits))));
}

const sign = (text: string): string => text.replace(/^-/, "−");

/** A whole number with thousands apart: 12,345. */
export function formatCount(value: number): string {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

const pad = (value: number): string => String(value).padStart(2, "0");

/** 850 ms, 42 s, 3 min 05 s, 2 h 14 min, 3 d 4 h. */
export function formatDuration(ms: number): string {
  if (!Number.isFinite(ms)) return "";
  const size = Math.max(0, ms);
  if (size < 1000) return `${Math.round(size)} ms`;
  const seconds = Math.round(size / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${pad(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${pad(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A rough distance in time: "now", "12 s ago", "in 5 min". */
export function formatAgo(ms: number, nowMs: number): string {
  const distance = nowMs - ms;
  const size = Math.abs(distance);
  if (size < 2000) return "now";
  const [count, unit] =
    size < 60_000 ? [size / 1000, "s"] : size < 3_600_000 ? [size / 60_000, "min"]
    : size < 48 * 3_600_000 ? [size / 3_600_000, "h"] : [size / 86_400_000, "d"];
  const text = `${Math.floor(count)} ${unit}`;
  return distance >= 0 ? `${text} ago` : `in ${text}`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Decimal units, as disks are sold: 1.2 GB. */
export function formatBytes(bytes: number): string {
  let size = bytes;
  let unit = 0;
  while (Math.abs(size) >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 || Math.abs(size) >= 99.95 ? Math.round(size) : Number(size.toFixed(1))} ${UNITS[unit] ?? ""}`;
}

/** Memory as it is asked for in jobs: MiB, said in GB from 1024 on. */
export const formatMemory = (mb: number): string =>
  mb >= 1024 ? `${Number((mb / 1024).toFixed(1))} GiB` : `${mb} MiB`;

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** 14:03 today, 18 Nov 14:03 this year, else 18 Nov 2025; in the reader's time zone. */
export function formatTime(ms: number, nowMs: number = machineNow()): string {
  const time = new Date(ms);
  const now = new Date(nowMs);
  const clock = `${pad(time.getHours())}:${pad(time.getMinutes())}`;
  const day = `${time.getDate()} ${MONTHS[time.getMonth()] ?? ""}`;
  if (time.getFullYear() !== now.getFullYear()) return `${day} ${time.getFullYear()}`;
  if (time.getMonth() !== now.getMonth() || time.getDate() !== now.getDate()) return `${day} ${clock}`;
  return clock;
}

/** A time to the second, for tooltips: 2026-11-18 14:03:07. */
export function formatExactTime(ms: number): string {
  const time = new Date(ms);
  const day = `${time.getFullYear()}-${pad(time.getMonth() + 1)}-${pad(time.getDate())}`;
  return `${day} ${pad(time.getHours())}:${pad(time.getMinutes())}:${pad(time.getSeconds())}`;
}

/** "1 run", "2 runs". */
export const formatPlural = (count: number, one: string, many = `${one}s`): string =>
  `${formatCount(count)} ${count === 1 ? one : many}`;
