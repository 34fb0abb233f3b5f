/* Decides when charts are painted: on animation frames only, and live changes at most ten times a second per chart. */

const LIVE_GAP_MS = 100;

interface Entry {
  paint: () => void;
  dueMs: number;
}

export class Painter {
  private readonly waiting = new Map<object, Entry>();
  private readonly paintedMs = new Map<object, number>();
  private isAsked = false;

  constructor(
    private readonly askFrame: (handle: (timeMs: number) => void) => void = (handle) => requestAnimationFrame(handle),
    private readonly nowMs: () => number = () => performance.now(),
  ) {}

  /** `isLive`: it may wait for its turn; else it is painted with the next frame. Of several requests the newest counts. */
  request(chart: object, paint: () => void, isLive: boolean): void {
    const due = isLive ? (this.paintedMs.get(chart) ?? -Infinity) + LIVE_GAP_MS : -Infinity;
    this.waiting.set(chart, { paint, dueMs: Math.min(due, this.waiting.get(chart)?.dueMs ?? Infinity) });
    this.ask();
  }

  forget(chart: object): void {
    this.waiting.delete(chart);
    this.paintedMs.delete(chart);
  }

  private ask(): void {
    if (this.isAsked) return;
    this.isAsked = true;
    this.askFrame(() => {
      this.isAsked = false;
      this.frame();
    });
  }

  private frame(): void {
    const now = this.nowMs();
    for (const [chart, entry] of [...this.waiting]) {
      if (entry.dueMs > now) continue;
      this.waiting.delete(chart);
      this.paintedMs.set(chart, now);
      entry.paint();
    }
    if (this.waiting.size > 0) this.ask();
  }
}

export const painter = new Painter();
