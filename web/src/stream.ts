/* One EventSource for the whole page: live runs, events and logs.

   A subscriber either says what it has (`after`) and misses nothing, or says nothing and gets what is new. When `onSync` is
   called, it fetches everything it shows: messages keep it up to date from there on, and may repeat what the fetch had.
   `onSync` is called when a subscription without `after` becomes live, and when the server could not replay what was missed.
   Connections that break are opened again from the last position, without a sync.

   A hidden page closes its connection after a while: browsers allow about six per server, over all tabs. */

import { signal } from "@preact/signals";

import { apiUrl } from "./api";
import type { Health, Run, TrainerEvent } from "./types";

export interface Messages {
  run: Run;
  removed: { run_id: string };
  events: { run_id: string; events: TrainerEvent[] };
  log: { run_id: string; offset: number; next_offset: number; text: string };
  end: { run_id: string }; // the run has ended, and all of its events or log were sent
  health: Health;
}
type Kind = keyof Messages;
const KINDS: readonly Kind[] = ["run", "removed", "events", "log", "end", "health"];

export type Message = { [K in Kind]: { kind: K; data: Messages[K] } }[Kind];

/** What is asked for. `after`: the change counter, seq or log offset that the subscriber has. */
export type Topic =
  | { kind: "runs"; after?: number }
  | { kind: "events"; runId: string; after?: number }
  | { kind: "log"; runId: string; after?: number };

export interface Subscription {
  topic: Topic;
  onSync?: () => void;
  onMessage: (message: Message) => void;
}

/** As much of an EventSource as is used. */
export interface Source {
  addEventListener(type: string, listener: (event: MessageEvent) => void): void;
  close(): void;
}

export type Connection = "connecting" | "live" | "lost" | "paused";

const BACKOFF_MS = [500, 1000, 2000, 5000, 10_000];
const HIDDEN_MS = 15_000;
// A run's removal is sent up to a second after changes of others. So a reconnect asks from a little earlier.
const SETTLE_MS = 3000;

const keyOf = (topic: Topic): string => (topic.kind === "runs" ? "runs" : `${topic.kind} ${topic.runId}`);

export class LiveStream {
  readonly connection = signal<Connection>("connecting");
  /** What the server says went wrong with one topic; the others go on. */
  onFault: (message: string) => void = () => undefined;

  private subscriptions = new Set<Subscription>();
  private unsynced = new Set<Subscription>(); // to be told to fetch, once live
  private positions = new Map<string, number>(); // by topic: what was last received
  private newestChange: number | null = null; // not yet a position
  private settledAt = 0;
  private source: Source | null = null;
  private openTopics = "";
  private failures = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isPaused = false;

  constructor(
    private readonly open: (url: string) => Source,
    private readonly onFailure: () => void = () => undefined,
  ) {}

  /** Returns how to end it. Subscriptions made in one go share one connection. */
  subscribe(subscription: Subscription): () => void {
    const { topic } = subscription;
    const key = keyOf(topic);
    const known = this.positions.get(key);
    this.subscriptions.add(subscription);
    if (topic.after === undefined) this.unsynced.add(subscription);
    else if (known === undefined) this.positions.set(key, topic.after);
    else if (topic.after < known) this.unsynced.add(subscription); // others have read on; it catches up by a fetch
    this.schedule(0);
    return () => {
      this.subscriptions.delete(subscription);
      this.unsynced.delete(subscription);
      if (![...this.subscriptions].some((one) => keyOf(one.topic) === key)) this.positions.delete(key);
      this.schedule(0);
    };
  }

  /** No connection while nobody looks at the page. */
  setPaused(isPaused: boolean): void {
    if (isPaused === this.isPaused) return;
    this.isPaused = isPaused;
    if (isPaused) {
      this.drop();
      clearTimeout(this.timer);
      this.connection.value = "paused";
    } else {
      this.failures = 0;
      this.connection.value = "connecting";
      this.schedule(0);
    }
  }

  private schedule(delayMs: number): void {
    clearTimeout(this.timer);
    if (!this.isPaused) this.timer = setTimeout(() => this.connect(), delayMs);
  }

  private url(keys: readonly string[]): string {
    const of = (kind: string): string[] =>
      keys.filter((key) => key.startsWith(`${kind} `)).map((key) => {
        const runId = key.slice(kind.length + 1);
        const position = this.positions.get(key);
        return position === undefined ? runId : `${runId}:${position}`;
      });
    const hasRuns = keys.includes("runs");
    return apiUrl(["stream"], {
      watch: hasRuns ? "runs" : null,
      after_change: hasRuns ? this.positions.get("runs") : null,
      events: of("events"),
      log: of("log"),
    });
  }

  private connect(): void {
    const keys = [...new Set([...this.subscriptions].map((one) => keyOf(one.topic)))].sort();
    const topics = keys.join("\n");
    if (this.source !== null && topics === this.openTopics) {
      if (this.connection.value === "live") this.sync(); // one more reader of what is already read
      return;
    }
    this.drop();
    if (keys.length === 0) return;
    for (const one of this.subscriptions) {
      if (!this.positions.has(keyOf(one.topic))) this.unsynced.add(one); // it gets what is new from here on, and fetches the rest
    }
    if (this.connection.value !== "lost") this.connection.value = "connecting";
    const source = this.open(this.url(keys));
    this.source = source;
    this.openTopics = topics;
    const ifCurrent = (handle: (event: MessageEvent) => void) => (event: MessageEvent) => {
      if (this.source === source) handle(event);
    };
    source.addEventListener("open", ifCurrent(() => this.opened()));
    source.addEventListener("error", ifCurrent(() => this.failed()));
    source.addEventListener("reset", ifCurrent(() => this.reset()));
    source.addEventListener("fault", ifCurrent((event) => this.onFault((JSON.parse(event.data as string) as { message: string }).message)));
    for (const kind of KINDS) source.addEventListener(kind, ifCurrent((event) => this.take(kind, event)));
  }

  private drop(): void {
    this.source?.close();
    this.source = null;
    this.openTopics = "";
  }

  private opened(): void {
    this.failures = 0;
    this.connection.value = "live";
    this.sync();
  }

  private failed(): void {
    this.drop();
    this.connection.value = "lost";
    this.schedule(BACKOFF_MS[Math.min(this.failures, BACKOFF_MS.length - 1)] ?? 0);
    this.failures += 1;
    this.onFailure();
  }

  private reset(): void {
    this.positions.clear(); // the server goes on from now
    this.newestChange = null;
    this.settledAt = 0;
    this.unsynced = new Set(this.subscriptions);
    this.sync();
  }

  private sync(): void {
    const fresh = [...this.unsynced];
    this.unsynced.clear();
    for (const subscription of fresh) subscription.onSync?.();
  }

  /** The id of a message has the registry's change counter: `c=41;r=40;…`. */
  private noteChange(event: MessageEvent): void {
    const change = /(?:^|;)c=(\d+)/.exec(event.lastEventId)?.[1];
    if (change === undefined) return;
    if (Date.now() - this.settledAt >= SETTLE_MS) {
      if (this.newestChange !== null) this.positions.set("runs", this.newestChange);
      this.settledAt = Date.now();
    }
    this.newestChange = Number(change);
  }

  private take(kind: Kind, event: MessageEvent): void {
    const message = { kind, data: JSON.parse(event.data as string) as unknown } as Message;
    this.noteChange(event);
    if (message.kind === "events") {
      const last = message.data.events.at(-1)?.seq;
      if (last !== undefined) this.positions.set(`events ${message.data.run_id}`, last);
    } else if (message.kind === "log") {
      this.positions.set(`log ${message.data.run_id}`, message.data.next_offset);
    }
    for (const subscription of [...this.subscriptions]) {
      if (isFor(subscription.topic, message)) subscription.onMessage(message);
    }
  }
}

function isFor(topic: Topic, message: Message): boolean {
  switch (message.kind) {
    case "run":
    case "removed":
    case "health":
      return topic.kind === "runs";
    case "end":
      return topic.kind !== "runs" && topic.runId === message.data.run_id;
    default:
      return topic.kind === message.kind && topic.runId === message.data.run_id;
  }
}

/** Closes the stream of a page that has been hidden for a while, unless it is needed then, too, and of one that was left: a
    browser keeps a few of those for the way back, and each stream would take one of its six connections to the server. */
export function pauseWhileHidden(
  stream: LiveStream, isNeeded: () => boolean, page: Document = document, mayConnect: () => boolean = () => true, frame: Window = window,
): void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const look = (): void => {
    clearTimeout(timer);
    if (page.hidden) timer = setTimeout(() => stream.setPaused(!isNeeded()), HIDDEN_MS);
    else stream.setPaused(!mayConnect());
  };
  page.addEventListener("visibilitychange", look);
  frame.addEventListener("pagehide", () => {
    clearTimeout(timer);
    stream.setPaused(true);
  });
  frame.addEventListener("pageshow", (event) => { if (event.persisted) look(); });
  if (page.hidden) look(); // opened in a tab behind this one
}
