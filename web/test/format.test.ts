import { describe, expect, test } from "vitest";

import {
  formatAgo, formatBytes, formatCount, formatDuration, formatMemory, formatNumber, formatPlural, formatTime,
} from "../src/format";

describe("numbers", () => {
  test.each([
    [0, "0"], [0.123456, "0.1235"], [12, "12"], [1234, "1,234"], [-2.5, "−2.5"], [1234567, "1.235e6"],
    [0.00001234, "1.234e-5"], [1e-5, "1e-5"], [12345.6, "12,346"], ["nan", "NaN"], ["inf", "∞"], ["-inf", "−∞"],
  ] as const)("%s is said as %s", (value, text) => expect(formatNumber(value)).toBe(text));

  test("a value that is not there is empty", () => expect(formatNumber(undefined)).toBe(""));
  test("counts keep every digit", () => expect(formatCount(12345678)).toBe("12,345,678"));
  test("one and many", () => expect([formatPlural(1, "run"), formatPlural(2000, "run")]).toEqual(["1 run", "2,000 runs"]));
});

describe("durations", () => {
  test.each([
    [0, "0 ms"], [850, "850 ms"], [42_000, "42 s"], [185_000, "3 min 05 s"], [8_040_000, "2 h 14 min"],
    [273_600_000, "3 d 4 h"], [-5, "0 ms"],
  ])("%d ms is %s", (ms, text) => expect(formatDuration(ms)).toBe(text));
  test("a number that is none is empty", () => expect(formatDuration(Number.NaN)).toBe(""));
  test.each([[0, "now"], [12_000, "12 s ago"], [-300_000, "in 5 min"], [7_200_000, "2 h ago"], [259_200_000, "3 d ago"]])(
    "%d ms ago is %s", (ms, text) => expect(formatAgo(1e12 - ms, 1e12)).toBe(text));
});

test.each([[0, "0 B"], [999, "999 B"], [1500, "1.5 kB"], [999_999, "1 MB"], [123_456_789, "123 MB"], [1.2e9, "1.2 GB"]])(
  "%d bytes are %s", (bytes, text) => expect(formatBytes(bytes)).toBe(text));
test("memory is said in GiB from 1024 MiB on", () => expect([formatMemory(512), formatMemory(16384)]).toEqual(["512 MiB", "16 GiB"]));

test("a time says as much of its day as is needed", () => {
  const now = new Date(2026, 10, 18, 15, 0).getTime();
  expect(formatTime(new Date(2026, 10, 18, 9, 5).getTime(), now)).toBe("09:05");
  expect(formatTime(new Date(2026, 10, 1, 9, 5).getTime(), now)).toBe("1 Nov 09:05");
  expect(formatTime(new Date(2025, 10, 1, 9, 5).getTime(), now)).toBe("1 Nov 2025");
});

test("the time is that of the machine, where the browser's clock is another one", async () => {
  const { machineNow, noteTime } = await import("../src/clock");
  const isAhead = (ms: number): boolean => Math.abs(machineNow() - Date.now() - ms) < 1000;
  const told = (ms: number): string => new Date(Date.now() + ms).toUTCString();
  noteTime(told(3000));
  expect(isAhead(0)).toBe(true); // an answer takes its time
  noteTime(told(-86_400_000));
  expect(isAhead(-86_400_000)).toBe(true);
  noteTime(told(-86_398_000));
  noteTime(null);
  noteTime("no date");
  expect(isAhead(-86_400_000)).toBe(true); // it does not jump to and fro
  noteTime(told(0));
  expect(isAhead(0)).toBe(true);
});
