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

/** What a search has found so far. */
interface Search {
  text: string;
  found: Match[];
  /** Where it continues; null: all of the log was searched. */
  next: number | null;
}

const MAX_MATCHES = 200; // of one request

/** Searches on until something is found, or the end. */
async function searchOn({ text, found, next }: Search, runId: string, abort: AbortSignal, onMove: (offset: number) => void): Promise<Search> {
  let from = next;
  while (from !== null) {
    const answer: { matches: Match[]; next_offset: number; is_end: boolean } = await get(
      ["runs", runId, "log", "search"], { q: text, from_offset: from, limit: MAX_MATCHES }, abort,
    );
    from = answer.is_end ? null : answer.next_offset;
    if (answer.matches.length > 0) return { text, found: [...found, ...answer.matches], next: from };
    if (from !== null) onMove(from);
  }
  return { text, found, next: null };
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
  const searching = useRef<AbortController | null>(null);
  const [search, setSearch] = useState<Search | null>(null);
  const [searched, setSearched] = useState<number | null>(null); // how far a search is that goes on
  const [current, setCurrent] = useState(-1);
  const wanted = query.value.get("find") ?? "";
  const [typed, setTyped] = useState(wanted); // kept while lines come
  useEffect(() => setTyped(wanted), [wanted]);

  const put = (window: LogWindow, top: number | null): void => {
    shown.current = window;
    version.value += 1;
    // After the new height is laid out.
    const by = top === null ? 0 : top - (view.current?.scrollTop ?? 0); // the reader may scroll on meanwhile
    if (Math.abs(by) > 1) requestAnimationFrame(() => { if (view.current !== null) view.current.scrollTop += by; });
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
      searching.current?.abort();
    };
  }, [runId]);

  const go = (index: number, list: Search): void => {
    const match = list.found[index];
    if (match === undefined) return;
    setCurrent(index);
    isFollowed.value = false;
    setQuery({ at: String(match.offset) });
    void readAround(match.offset, null);
  };
  const searchFrom = async (before: Search, index: number): Promise<void> => {
    searching.current?.abort();
    const abort = (searching.current = new AbortController());
    try {
      const list = await searchOn(before, runId, abort.signal, (offset) => setSearched(offset));
      setSearch(list);
      go(index, list);
    } catch (reason) {
      if (!abort.signal.aborted) error.value = asApiError(reason).message;
    } finally {
      if (searching.current === abort) {
        searching.current = null;
        setSearched(null);
      }
    }
  };
  const find = (text: string): void => {
    setQuery({ find: text });
    setCurrent(-1);
    setSearch(null);
    searching.current?.abort();
    if (text === "") return;
    setSearched(0);
    void searchFrom({ text, found: [], next: 0 }, 0);
  };
  const step = (by: number): void => {
    if (search === null) return;
    if (current + by >= search.found.length && search.next !== null) void searchFrom(search, current + by);
    else if (search.found.length > 0) go((current + by + search.found.length) % search.found.length, search);
  };

  version.value;
  const window = shown.current;
  const range = window === null ? { from: 0, to: 0 } : visibleLines(window, scrollTop.value, view.current?.clientHeight ?? 600);
  const marked = search?.found[current]?.offset;
  const isLive = model.run.value !== null && !isTerminal(model.run.value);
  return (
    <section class="log card" aria-label="Log">
      <div class="log-tools">
        <form class="row" role="search" onSubmit={(event) => {
          event.preventDefault();
          if (search?.text === typed && typed !== "") step(1);
          else find(typed);
        }}>
          <input class="input" type="search" placeholder="Find in log" aria-label="Find in log" value={typed}
            onInput={(event) => setTyped(event.currentTarget.value)} />
          <Button type="submit" icon="search" label="Find" />
        </form>
        <span class="row" role="status">
          {searched !== null ? `Searching… ${formatBytes(searched)}` : search !== null && (search.found.length === 0 ? "No lines match"
            : `${formatCount(current + 1)} of ${formatPlural(search.found.length, "line")}${search.next === null ? "" : " or more"}`)}
          {search !== null && search.found.length > 0 && <Button isSmall icon="up" label="Previous match" onClick={() => step(-1)} />}
          {search !== null && search.found.length > 0 && <Button isSmall icon="down" label="Next match" onClick={() => step(1)} />}
        </span>
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
                {search === null ? line.text
                  : splitMatches(line.text, search.text).map((piece, i) => (i % 2 === 1 ? <mark key={i}>{piece}</mark> : piece))}
              </div>
            ))}
          </div>
        </div>
      </div>
    </section>
  );
}
