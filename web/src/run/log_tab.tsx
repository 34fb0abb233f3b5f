/* The log of a run: any size, read in pieces around what is visible. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";

import { apiUrl, get, request } from "../api";
import { formatBytes, formatCount, formatPlural } from "../format";
import { query, setQuery } from "../router";
import { asApiError, stream } from "../store";
import { isTerminal } from "../types";
import { Button } from "../ui/controls";
import { Icon } from "../ui/icon";
import {
  appendBytes, findLevel, findNeed, LINE_HEIGHT, lineAt, type LogWindow, placeWindow, rangeAround, splitLines, splitMatches,
  visibleLines, WINDOW_BYTES,
} from "./log_window";
import type { RunModel } from "./run_model";

interface Match {
  offset: number;
}

async function readPiece(runId: string, params: { offset?: number; limit?: number; tail?: number }, abort: AbortSignal) {
  const response = await request(apiUrl(["runs", runId, "log"], params), { signal: abort });
  const bytes = new Uint8Array(await response.arrayBuffer());
  const offset = Number(response.headers.get("X-Log-Offset") ?? 0);
  return { bytes, offset, size: Math.max(Number(response.headers.get("X-Log-Size") ?? 0), offset + bytes.length) };
}

export function LogTab({ model }: { model: RunModel }) {
  const { runId } = model;
  const view = useRef<HTMLDivElement>(null);
  const shown = useRef<LogWindow | null>(null);
  const version = useSignal(0);
  const scrollTop = useSignal(0);
  const error = useSignal("");
  const isFollowed = useSignal(query.peek().get("at") === null);
  const reading = useRef<AbortController | null>(null);
  const [matches, setMatches] = useState<{ query: string; found: Match[]; isAll: boolean } | null>(null);
  const [current, setCurrent] = useState(-1);
  const search = query.value.get("find") ?? "";

  const put = (window: LogWindow, top: number | null): void => {
    shown.current = window;
    version.value += 1;
    // After the new height is laid out.
    if (top === null) return;
    requestAnimationFrame(() => {
      if (view.current !== null && Math.abs(view.current.scrollTop - top) > 1) view.current.scrollTop = top;
    });
  };

  /** `anchorY`: where the line at `offset` shall be in the scroll range; null: in the middle of the view. */
  const readAround = async (offset: number | null, anchorY: number | null): Promise<void> => {
    reading.current?.abort();
    const abort = (reading.current = new AbortController());
    try {
      const size = shown.current?.size ?? Infinity;
      const around = offset === null ? null : rangeAround(offset, size);
      const piece = await readPiece(runId, around === null ? { tail: WINDOW_BYTES } : { offset: around.start, limit: around.limit }, abort.signal);
      const part = splitLines(piece.bytes, piece.offset, piece.offset + piece.bytes.length >= piece.size);
      const window = placeWindow(part, piece.size, offset ?? piece.size, anchorY ?? (shown.current?.height ?? 0) / 2);
      error.value = "";
      const height = view.current?.clientHeight ?? 0;
      if (offset === null) put(window, window.height);
      else if (anchorY === null) put(window, window.top + lineAt(window.lines, offset) * LINE_HEIGHT - height / 2);
      else put(window, window.top + lineAt(window.lines, offset) * LINE_HEIGHT + ((view.current?.scrollTop ?? 0) - anchorY));
    } catch (reason) {
      if (!abort.signal.aborted) error.value = asApiError(reason).message;
    } finally {
      if (reading.current === abort) reading.current = null;
    }
  };

  const scrolled = (): void => {
    const { current: element } = view;
    const window = shown.current;
    if (element === null || window === null) return;
    scrollTop.value = element.scrollTop;
    const isAtEnd = window.end >= window.size && element.scrollTop + element.clientHeight >= window.height - LINE_HEIGHT;
    if (isAtEnd !== isFollowed.peek() && reading.current === null) isFollowed.value = isAtEnd;
    if (reading.current !== null) return;
    const need = findNeed(window, element.scrollTop, element.clientHeight);
    if (need.kind === "more") void readAround(need.anchor, need.anchorY);
    else if (need.kind === "jump") void readAround(need.offset, element.scrollTop + element.clientHeight / 2);
  };

  useEffect(() => {
    const at = query.peek().get("at");
    const stop = stream.subscribe({
      topic: { kind: "log", runId },
      onSync: () => void readAround(shown.current === null && at !== null ? Number(at) : null, null),
      onMessage: (message) => {
        if (message.kind !== "log" || shown.current === null) return;
        const { offset, text } = message.data;
        const next = appendBytes(shown.current, offset, new TextEncoder().encode(text));
        if (next === null) void readAround(null, null);
        else if (next !== shown.current) put(next, isFollowed.peek() ? next.height : null);
      },
    });
    void readAround(at === null ? null : Number(at), null);
    return () => {
      stop();
      reading.current?.abort();
    };
  }, [runId]);

  const go = (index: number, list = matches): void => {
    const match = list?.found[index];
    if (match === undefined) return;
    setCurrent(index);
    isFollowed.value = false;
    setQuery({ at: String(match.offset) });
    void readAround(match.offset, null);
  };
  const find = async (text: string): Promise<void> => {
    setQuery({ find: text });
    setCurrent(-1);
    if (text === "") {
      setMatches(null);
      return;
    }
    try {
      const { matches: found } = await get<{ matches: Match[] }>(["runs", runId, "log", "search"], { q: text, limit: 200 });
      const list = { query: text, found, isAll: found.length < 200 };
      setMatches(list);
      go(0, list);
    } catch (reason) {
      error.value = asApiError(reason).message;
    }
  };
  const more = async (): Promise<void> => {
    const last = matches?.found.at(-1);
    if (matches === null || last === undefined) return;
    const { matches: found } = await get<{ matches: Match[] }>(["runs", runId, "log", "search"], { q: matches.query, from_offset: last.offset + 1, limit: 200 });
    const list = { ...matches, found: [...matches.found, ...found], isAll: found.length < 200 };
    setMatches(list);
    go(current + 1, list);
  };
  const next = (step: number): void => {
    if (matches === null) return;
    if (current + step >= matches.found.length && !matches.isAll) void more();
    else go((current + step + matches.found.length) % Math.max(matches.found.length, 1));
  };

  version.value;
  const window = shown.current;
  const range = window === null ? { from: 0, to: 0 } : visibleLines(window, scrollTop.value, view.current?.clientHeight ?? 600);
  const marked = matches?.found[current]?.offset;
  const isLive = model.run.value !== null && !isTerminal(model.run.value);
  return (
    <section class="log card" aria-label="Log">
      <div class="log-tools">
        <form class="row" role="search" onSubmit={(event) => {
          event.preventDefault();
          const text = new FormData(event.currentTarget).get("find") as string;
          if (matches?.query === text && text !== "") next(1);
          else void find(text);
        }}>
          <input class="input" name="find" type="search" placeholder="Find in log" aria-label="Find in log" value={search} />
          <Button type="submit" icon="search" label="Find" />
        </form>
        {matches !== null && (
          <span class="row" role="status">
            {matches.found.length === 0 ? "No lines match" : `${formatCount(current + 1)} of ${formatPlural(matches.found.length, "line")}${matches.isAll ? "" : " or more"}`}
            {matches.found.length > 0 && <Button isSmall icon="up" label="Previous match" onClick={() => next(-1)} />}
            {matches.found.length > 0 && <Button isSmall icon="down" label="Next match" onClick={() => next(1)} />}
          </span>
        )}
        <span class="grow" />
        {window !== null && <span class="muted">{formatBytes(window.size)}</span>}
        {isLive && (
          <label class="check"><input type="checkbox" checked={isFollowed.value} onChange={(event) => {
            isFollowed.value = event.currentTarget.checked;
            if (isFollowed.value) {
              setQuery({ at: null });
              void readAround(null, null);
            }
          }} /> Follow</label>
        )}
        <a class="button" href={apiUrl(["runs", runId, "log", "download"])} download><Icon name="download" />Download</a>
      </div>
      {error.value !== "" && <p class="fault" role="alert">{error.value}</p>}
      <div class="log-lines" ref={view} tabIndex={0} role="log" aria-label="Lines of the log" aria-live="off" onScroll={scrolled}>
        {window !== null && window.lines.length === 0 && <p class="muted nothing">The log is empty.</p>}
        <div class="all" style={{ height: `${window?.height ?? 0}px` }}>
          <div class="some" style={{ transform: `translateY(${(window?.top ?? 0) + range.from * LINE_HEIGHT}px)` }}>
            {window?.lines.slice(range.from, range.to).map((line) => (
              <div key={line.offset} class={`line ${findLevel(line.text)}${line.offset === marked ? " marked" : ""}`}>
                {matches === null ? line.text
                  : splitMatches(line.text, matches.query).map((piece, i) => (i % 2 === 1 ? <mark key={i}>{piece}</mark> : piece))}
              </div>
            ))}
          </div>
        </div>
      </div>
    </section>
  );
}
