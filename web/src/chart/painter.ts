/* Decides when charts are painted: on animation frames only. Live changes of all charts share a frame, ten times a second
   at most: a browser's frame costs more than the charts in it. */

const LIVE_GAP_MS = 100;

/** What a browser gives. */
export interface Timing {
  nowMs: () => number;
  askFrame: (handle: () => void) => void;
  wait: (handle: () => void, ms: number) => void;
}

const BROWSER: Timing = {
  nowMs: () => performance.now(),
  askFrame: (handle) => requestAnimationFrame(handle),
  wait: (handle, ms) => setTimeout(handle, ms),
};

export class Painter {
  private readonly waiting = new Map<object, { paint: () => void; isLive: boolean }>();
  private liveMs = -Infinity;
  private isFrameAsked = false;
  private isWaiting = false;

  constructor(private readonly timing: Timing = BROWSER) {}

  /** `isLive`: it may wait for its turn; else it is painted with the next frame. Of several requests the newest counts. */
  request(chart: object, paint: () => void, isLive: boolean): void {
    this.waiting.set(chart, { paint, isLive: isLive && (this.waiting.get(chart)?.isLive ?? true) });
    if (!isLive) this.askFrame();
    else if (!this.isWaiting) {
      this.isWaiting = true;
      const due = this.liveMs + LIVE_GAP_MS - this.timing.nowMs();
      if (due <= 0) this.askFrame();
      else this.timing.wait(() => this.askFrame(), due);
    }
  }

  forget(chart: object): void {
    this.waiting.delete(chart);
  }

  private askFrame(): void {
    if (this.isFrameAsked) return;
    this.isFrameAsked = true;
    this.timing.askFrame(() => this.frame());
  }

  private frame(): void {
    this.isFrameAsked = false;
    const now = this.timing.nowMs();
    const isLiveDue = now >= this.liveMs + LIVE_GAP_MS;
    const due = [...this.waiting].filter(([, { isLive }]) => !isLive || isLiveDue);
    if (isLiveDue) {
      this.isWaiting = false;
      this.liveMs = now;
    }
    for (const [chart, { paint }] of due) {
      this.waiting.delete(chart);
      paint();
    }
    // A timer drops parts of a millisecond, so its frame may come too early: without another one nothing live is painted again.
    if (!isLiveDue && this.isWaiting) this.timing.wait(() => this.askFrame(), Math.ceil(this.liveMs + LIVE_GAP_MS - now));
  }
}

export const painter = new Painter();
