import { expect, test } from "vitest";

import {
  appendBytes, findLevel, findNeed, LINE_HEIGHT, type LogWindow, placeWindow, plainText, rangeAround, splitLines, splitMatches,
  visibleLines, WINDOW_BYTES,
} from "../../src/run/log_window";

const encode = (text: string): Uint8Array => new TextEncoder().encode(text);

/** A log of a gigabyte, made where it is read: lines of 100 bytes. */
const SIZE = 1_000_000_000;
function read(start: number, limit: number): Uint8Array {
  const end = Math.min(start + limit, SIZE);
  const bytes = new Uint8Array(end - start).fill(120);
  for (let at = Math.ceil((start + 1) / 100) * 100 - 1; at < end; at += 100) bytes[at - start] = 10;
  return bytes;
}
function load(offset: number, anchorY: number): LogWindow {
  const { start, limit } = rangeAround(offset, SIZE);
  return placeWindow(splitLines(read(start, limit), start, start + limit >= SIZE), SIZE, offset, anchorY);
}

test("only whole lines are shown, with the offset of each", () => {
  const part = splitLines(encode("half\none\ntwo\nhal"), 1000, false);
  expect(part.lines).toEqual([{ offset: 1005, text: "one" }, { offset: 1009, text: "two" }]);
  expect([part.start, part.end]).toEqual([1005, 1013]);
});

test("the end of a log is shown also without its newline", () => {
  const part = splitLines(encode("one\ntw"), 0, true);
  expect(part.lines.map(({ text }) => text)).toEqual(["one", "tw"]);
  expect(part.isOpen).toBe(true);
});

test("a line longer than a window is shown in pieces", () => {
  expect(splitLines(new Uint8Array(10).fill(97), 500, false).lines).toEqual([{ offset: 500, text: "aaaaaaaaaa" }]);
});

test("offsets count bytes, not characters", () => {
  expect(splitLines(encode("größe\nx\n"), 0, true).lines[1]).toEqual({ offset: 8, text: "x" });
});

test("colours are left out, and of a progress bar the last state is shown", () => {
  expect(plainText("\x1b[31mred\x1b[0m")).toBe("red");
  expect(plainText("10%\r50%\r100%\r")).toBe("100%");
  expect(plainText("x".repeat(5000))).toContain("1000 more characters");
});

test("a gigabyte is scrolled from its beginning to its end by lines, and every line is met once", () => {
  const view = 600;
  let window = load(0, 0);
  let scrollTop = 0;
  let next = 0;
  for (let i = 0; i < 3000; i++) {
    const need = findNeed(window, scrollTop, view);
    if (need.kind === "more") {
      const before = window.lines[Math.floor((scrollTop - window.top) / LINE_HEIGHT)]!.offset;
      window = load(need.anchor, need.anchorY);
      expect(window.lines[Math.floor((scrollTop - window.top) / LINE_HEIGHT)]!.offset).toBe(before);
    }
    expect(need.kind).not.toBe("jump");
    const { from, to } = visibleLines(window, scrollTop, view);
    for (const line of window.lines.slice(from, to)) {
      if (line.offset < next) continue;
      expect(line.offset).toBe(next);
      next += 100;
    }
    scrollTop += 500;
  }
  expect(next).toBeGreaterThan(3000 * 25 * 100);
});

test("a jump by the scroll bar reads the place in proportion; the ends are reached exactly", () => {
  const first = load(0, 0);
  const middle = findNeed(first, first.height / 2, 600);
  expect(middle.kind).toBe("jump");
  const offset = middle.kind === "jump" ? middle.offset : 0;
  expect(Math.abs(offset / SIZE - 0.5)).toBeLessThan(0.01);
  const window = load(offset, first.height / 2);
  expect(findNeed(window, first.height / 2, 600).kind).toBe("nothing");
  const last = load(SIZE, first.height);
  expect(last.end).toBe(SIZE);
  expect(last.height).toBe(last.top + last.lines.length * LINE_HEIGHT);
  expect(load(0, 5_000_000).top).toBe(0);
});

test("the end of a log stands at the end of the scroll range, and its beginning can be jumped to from there", () => {
  const last = load(SIZE, 0);
  expect(last.height).toBe(8_000_000);
  expect(findNeed(last, 0, 600)).toEqual({ kind: "jump", offset: 0 });
  expect(findNeed(last, last.height - 600, 600).kind).toBe("nothing");
  const small = placeWindow(splitLines(encode("a\nb\n"), 0, true), 4, 4, 0);
  expect([small.top, small.height]).toEqual([0, 2 * LINE_HEIGHT]);
});

test("the scroll range never exceeds what browsers lay out", () => {
  expect(load(SIZE / 2, 4_000_000).height).toBeLessThanOrEqual(16_000_000);
});

test("live bytes are added at the end, and a followed log keeps one window in memory", () => {
  let window = placeWindow(splitLines(encode("a\n"), 0, true), 2, 0, 0);
  for (let i = 0; i < 20_000; i++) window = appendBytes(window, window.end, encode(`line ${i} ${"x".repeat(50)}\n`))!;
  expect(window.lines.at(-1)!.text).toContain("line 19999");
  expect(window.end - window.start).toBeLessThanOrEqual(2 * WINDOW_BYTES + 100);
  expect(window.lines[0]!.offset).toBe(window.start);
});

test("bytes that do not follow the window ask for a new read; repeated ones change nothing", () => {
  const window = placeWindow(splitLines(encode("a\nb\n"), 0, true), 4, 0, 0);
  expect(appendBytes(window, 9, encode("z\n"))).toBe(null);
  expect(appendBytes(window, 0, encode("a\nb\n"))).toBe(window);
  expect(appendBytes(window, 2, encode("b\nc\n"))!.lines.map(({ text }) => text)).toEqual(["a", "b", "c"]);
  expect(appendBytes({ ...window, isOpen: true }, 4, encode("c\n"))).toBe(null);
  expect(appendBytes({ ...window, size: 100 }, 100, encode("c\n"))!.size).toBe(102);
});

test("levels and matches are found", () => {
  expect(["12:00 ERROR x", "WARNING: y", "Traceback (most recent call last):", "ValueError: bad", "all fine", "DEBUG z"].map(findLevel))
    .toEqual(["error", "warning", "error", "error", "", "debug"]);
  expect(splitMatches("Loss loss", "loss")).toEqual(["", "Loss", " ", "loss", ""]);
  expect(splitMatches("abc", "")).toEqual(["abc"]);
});
