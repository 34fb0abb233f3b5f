/* Which part of a log is in memory and where it is on the screen. Pure: a log of any size costs one window.

   The window is a stretch of whole lines around what is visible. It hangs where the scroll position is; the rest of the
   scroll range stands for the bytes before and after it. A jump far away is a place in bytes, in proportion. */

export interface LogLine {
  /** Of its first byte. */
  offset: number;
  text: string;
}

export interface LogWindow {
  /** First byte and the one after the last. */
  start: number;
  end: number;
  /** Of the whole log, as far as is known. */
  size: number;
  lines: LogLine[];
  /** The last line has no newline yet. */
  isOpen: boolean;
  /** Where the first line of the window is, in pixels of the scroll range. */
  top: number;
  /** Of the whole scroll range. */
  height: number;
}

export const WINDOW_BYTES = 256 * 1024;
export const LINE_HEIGHT = 18;
const MAX_HEIGHT = 8_000_000; // browsers lay out no more than about 16 million pixels
const MAX_TEXT = 4000;
const NEWLINE = 10;

/** Where to read for a place in bytes: half before it, half after. */
export function rangeAround(offset: number, size: number): { start: number; limit: number } {
  const start = Math.max(Math.min(offset - WINDOW_BYTES / 2, size - WINDOW_BYTES), 0);
  return { start, limit: WINDOW_BYTES };
}

/** A stretch of whole lines. */
export type LogPart = Pick<LogWindow, "start" | "end" | "lines" | "isOpen">;

/**
 * Lines of some bytes of a log. What is before the first newline belongs to a line that began earlier, unless `start` is 0;
 * what is after the last newline is shown only at the end of the log.
 */
export function splitLines(bytes: Uint8Array, start: number, isEnd: boolean): LogPart {
  const decoder = new TextDecoder();
  let from = 0;
  if (start > 0) {
    const first = bytes.indexOf(NEWLINE);
    from = first < 0 ? 0 : first + 1; // a line longer than the window is shown in pieces
  }
  const lines: LogLine[] = [];
  let isOpen = false;
  let at = from;
  while (at < bytes.length) {
    const newline = bytes.indexOf(NEWLINE, at);
    if (newline < 0 && !isEnd && lines.length > 0) break;
    isOpen = newline < 0;
    lines.push({ offset: start + at, text: plainText(decoder.decode(bytes.subarray(at, isOpen ? bytes.length : newline))) });
    at = isOpen ? bytes.length : newline + 1;
  }
  return { lines, start: start + from, end: start + at, isOpen };
}

const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;

/** As a terminal would show it in the end: without colours, and of a progress bar its last state. */
export function plainText(text: string): string {
  let plain = text.replace(ESCAPES, "").replace(/\r+$/, "");
  const back = plain.lastIndexOf("\r");
  if (back >= 0) plain = plain.slice(back + 1);
  if (plain.length <= MAX_TEXT) return plain;
  return `${plain.slice(0, MAX_TEXT)} … [${plain.length - MAX_TEXT} more characters; download the log to see them]`;
}

/** A window so that the line at `anchor` (a byte offset) is `anchorY` pixels into the scroll range, as far as the ends allow. */
export function placeWindow(part: LogPart, size: number, anchor: number, anchorY: number): LogWindow {
  const { lines, start, end } = part;
  const own = lines.length * LINE_HEIGHT;
  const perByte = end > start ? own / (end - start) : 0;
  const before = start > 0 ? LINE_HEIGHT : 0; // there must be something to scroll to, on both sides
  const after = end < size ? LINE_HEIGHT : 0;
  const height = Math.max(Math.min(size * perByte, MAX_HEIGHT), before + own + after);
  const last = height - own;
  const wished = start === 0 ? 0 : end >= size ? last : anchorY - Math.max(lineAt(lines, anchor), 0) * LINE_HEIGHT;
  return { ...part, size, top: Math.min(Math.max(wished, before), last - after), height };
}

/** Index of the line that holds a byte; -1: it is before the first. */
export function lineAt(lines: readonly LogLine[], offset: number): number {
  let low = 0;
  let high = lines.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle]!.offset <= offset) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export type Need =
  | { kind: "nothing" }
  /** More lines before or after; what is visible stays where it is. */
  | { kind: "more"; anchor: number; anchorY: number }
  /** A place outside of the window. */
  | { kind: "jump"; offset: number };

/** What has to be read for a scroll position. */
export function findNeed(window: LogWindow, scrollTop: number, viewHeight: number): Need {
  const bottom = window.top + window.lines.length * LINE_HEIGHT;
  const isOutside = scrollTop + viewHeight < window.top || scrollTop > bottom;
  if (isOutside && (window.start > 0 || window.end < window.size)) {
    const part = scrollTop / Math.max(window.height - viewHeight, 1);
    return { kind: "jump", offset: Math.floor(Math.min(part, 1) * window.size) };
  }
  const isNearTop = window.start > 0 && scrollTop - window.top < viewHeight;
  const isNearEnd = window.end < window.size && bottom - (scrollTop + viewHeight) < viewHeight;
  if (!isNearTop && !isNearEnd) return { kind: "nothing" };
  const index = Math.min(Math.max(Math.floor((scrollTop - window.top) / LINE_HEIGHT), 0), window.lines.length - 1);
  return { kind: "more", anchor: window.lines[index]?.offset ?? window.start, anchorY: window.top + index * LINE_HEIGHT };
}

/** Which lines to put on the screen. */
export function visibleLines(window: LogWindow, scrollTop: number, viewHeight: number): { from: number; to: number } {
  const spare = 10;
  const from = Math.max(Math.floor((scrollTop - window.top) / LINE_HEIGHT) - spare, 0);
  const to = Math.min(Math.ceil((scrollTop + viewHeight - window.top) / LINE_HEIGHT) + spare, window.lines.length);
  return { from: Math.min(from, to), to };
}

/** New bytes at the end of the log. Null: they do not follow the window's last line, so it has to be read again. */
export function appendBytes(window: LogWindow, offset: number, bytes: Uint8Array): LogWindow | null {
  const size = Math.max(window.size, offset + bytes.length);
  if (window.end < window.size) return { ...window, size }; // it shows another part of the log
  const fresh = bytes.subarray(Math.max(window.end - offset, 0));
  if (fresh.length === 0) return window;
  if (offset > window.end || window.isOpen) return null;
  const added = splitLines(fresh, 0, true);
  const end = window.end + fresh.length;
  let { start, top } = window;
  let lines = [...window.lines, ...added.lines.map((line) => ({ ...line, offset: line.offset + window.end }))];
  if (end - start > 2 * WINDOW_BYTES) {
    const keep = Math.max(lineAt(lines, end - WINDOW_BYTES), 0);
    start = lines[keep]!.offset;
    lines = lines.slice(keep);
    top += keep * LINE_HEIGHT;
    if (top + lines.length * LINE_HEIGHT > MAX_HEIGHT) top = MAX_HEIGHT / 2;
  }
  return { start, end, size, lines, isOpen: added.isOpen, top, height: top + lines.length * LINE_HEIGHT };
}

const LEVELS: readonly [RegExp, string][] = [
  [/\b(ERROR|CRITICAL|FATAL)\b|^Traceback |^\w+(Error|Exception):/, "error"],
  [/\bWARN(ING)?\b/, "warning"],
  [/\bDEBUG\b/, "debug"],
];

/** error, warning, debug, or empty: looked for near the beginning only. */
export function findLevel(text: string): string {
  const head = text.slice(0, 80);
  return LEVELS.find(([pattern]) => pattern.test(head))?.[1] ?? "";
}

/** A line in pieces, every second of which matches. */
export function splitMatches(text: string, search: string): string[] {
  if (search === "") return [text];
  const pieces: string[] = [];
  const lower = text.toLowerCase();
  const wanted = search.toLowerCase();
  let at = 0;
  for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, at)) {
    pieces.push(text.slice(at, found), text.slice(found, found + wanted.length));
    at = found + wanted.length;
  }
  pieces.push(text.slice(at));
  return pieces;
}
