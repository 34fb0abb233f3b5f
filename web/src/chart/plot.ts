/* One picture on a canvas: axes, grid and curves; and what a pointer does on it. */

import type { Range, XKind } from "./axis";
import { type Area, makeScale, type PaintOptions, paintScene } from "./paint";
import type { Scene } from "./scene";
import { linearTicks, logTicks, spanTicks, type Tick, timeTicks } from "./ticks";

export interface PlotEvents {
  onZoom(range: Range | null): void;
  /** The pointer's place on the axis, and on the picture in parts of its height from above; null: it left. */
  onCursor(x: number | null, height: number): void;
  onPick(x: number): void;
}

export interface Look extends PaintOptions {
  kind: XKind;
  font: string;
}

// In CSS pixels
const TOP = 8;
const RIGHT = 18;
const BOTTOM = 26;
const X_SPACE = 72; // between ticks, at least
const Y_SPACE = 34;
const MIN_DRAG = 4;

/** A pointer that is down: where it went down, and where it is. */
interface Held {
  from: number;
  now: number;
}

export class Plot {
  private readonly canvas = document.createElement("canvas");
  private readonly over = document.createElement("div"); // the plotting area
  private readonly line = document.createElement("i");
  private readonly selection = document.createElement("b");
  private readonly observer: ResizeObserver;
  private readonly held = new Map<number, Held>();
  private pinch: { range: Range; spread: number; centre: number } | null = null;
  private scene: Scene | null = null;
  private look: Look | null = null;
  private cursorX: number | null = null;
  // In CSS pixels. Asking the page for them at every painting would make it lay out everything once for each chart.
  private size = { width: 0, height: 0 };
  private width = 0; // of the plotting area
  private pointer: { left: number; height: number } | null = null; // where a mouse is

  constructor(
    root: HTMLElement,
    label: string,
    private readonly events: PlotEvents,
  ) {
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.over.className = "over";
    this.over.append(this.selection, this.line);
    this.selection.hidden = this.line.hidden = true;
    root.append(this.canvas, this.over);
    this.observer = new ResizeObserver((entries) => {
      const { width, height } = entries.at(-1)!.contentRect;
      this.size = { width, height };
      this.repaint();
    });
    this.observer.observe(root);
    this.listen();
  }

  destroy(): void {
    this.observer.disconnect();
    this.canvas.remove();
    this.over.remove();
  }

  /** For a picture to save; null: nothing was painted. */
  get picture(): HTMLCanvasElement | null {
    return this.scene === null ? null : this.canvas;
  }

  /** Paints at once: the caller decides when. */
  paint(scene: Scene, look: Look): void {
    const before = this.scene?.x;
    this.scene = scene;
    this.look = look;
    this.repaint();
    const isMoved = before !== undefined && (before[0] !== scene.x[0] || before[1] !== scene.x[1]);
    if (isMoved && this.pointer !== null) this.events.onCursor(this.valueAt(this.pointer.left), this.pointer.height);
  }

  /** Shows the cursor where this chart, another one or the keyboard has it. */
  setCursor(x: number | null): void {
    this.cursorX = x;
    const { scene } = this;
    this.line.hidden = scene === null || x === null || x < scene.x[0] || x > scene.x[1];
    if (!this.line.hidden) this.line.style.transform = `translateX(${this.scaleX()(x!)}px)`;
  }

  private repaint(): void {
    const { scene, look, canvas } = this;
    const { width, height } = this.size;
    if (scene === null || look === null || width === 0 || height === 0) return;
    const ratio = devicePixelRatio;
    const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
    const ctx = canvas.getContext("2d")!;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, columns, rows);
    ctx.font = look.font.replace(/[\d.]+px/, (size) => `${parseFloat(size) * ratio}px`);
    const yTicks = (look.isLogY ? logTicks : linearTicks)(scene.y, Math.max(Math.floor((height - TOP - BOTTOM) / Y_SPACE), 2));
    const widest = Math.max(...yTicks.map(({ label }) => ctx.measureText(label).width), 12 * ratio);
    const left = Math.ceil(widest / ratio) + 16;
    const area: Area = {
      left: left * ratio, top: TOP * ratio, width: (width - left - RIGHT) * ratio, height: (height - TOP - BOTTOM) * ratio, ratio,
    };
    this.width = width - left - RIGHT;
    if (area.width <= 0 || area.height <= 0) return;
    this.over.style.cssText = `left:${left}px;top:${TOP}px;right:${RIGHT}px;bottom:${BOTTOM}px`;
    paintAxes(ctx, scene, look, area, yTicks);
    paintScene(ctx, scene, area, look);
    this.setCursor(this.cursorX);
  }

  /** From values to CSS pixels of the plotting area. */
  private scaleX(): (value: number) => number {
    return makeScale(this.scene!.x, this.look!.isLogX, 0, this.width);
  }

  /** From CSS pixels of the plotting area to values. */
  private valueAt(left: number): number {
    const [low, high] = this.scene!.x;
    const part = Math.min(Math.max(left / Math.max(this.width, 1), 0), 1);
    return this.look!.isLogX ? low * Math.pow(high / low, part) : low + (high - low) * part;
  }

  private listen(): void {
    const { over } = this;
    const on = <K extends keyof HTMLElementEventMap>(kind: K, handle: (event: HTMLElementEventMap[K]) => void): void =>
      over.addEventListener(kind, (event) => { if (this.scene !== null) handle(event); }, { passive: false });
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event));
    on("pointercancel", (event) => {
      this.held.delete(event.pointerId);
      this.showSelection(null);
    });
    on("pointerleave", (event) => {
      this.pointer = null;
      if (event.pointerType !== "touch" && this.held.size === 0) this.events.onCursor(null, 0);
    });
    on("dblclick", () => this.events.onZoom(null));
    on("wheel", (event) => this.wheel(event));
  }

  private placeOf(event: MouseEvent): { left: number; height: number } {
    const box = this.over.getBoundingClientRect();
    return { left: event.clientX - box.left, height: (event.clientY - box.top) / Math.max(box.height, 1) };
  }

  private down(event: PointerEvent): void {
    if (event.pointerType !== "touch" && event.button !== 0) return;
    const { left } = this.placeOf(event);
    this.held.set(event.pointerId, { from: left, now: left });
    if (event.pointerType !== "touch") this.over.setPointerCapture(event.pointerId);
    this.pinch = null;
  }

  private move(event: PointerEvent): void {
    const { left, height } = this.placeOf(event);
    const held = this.held.get(event.pointerId);
    if (held !== undefined) held.now = left;
    if (event.pointerType !== "touch") this.pointer = { left, height };
    if (this.held.size === 2) {
      this.zoomByFingers();
      return;
    }
    this.events.onCursor(this.valueAt(left), height);
    if (held !== undefined && event.pointerType !== "touch") this.showSelection(held);
  }

  private up(event: PointerEvent): void {
    const held = this.held.get(event.pointerId);
    const isAlone = this.held.size === 1 && this.pinch === null;
    this.held.delete(event.pointerId);
    this.showSelection(null);
    if (held === undefined || !isAlone) return;
    const [low, high] = [Math.min(held.from, held.now), Math.max(held.from, held.now)];
    if (high - low < MIN_DRAG) this.events.onPick(this.valueAt(held.now));
    else if (event.pointerType !== "touch") this.events.onZoom([this.valueAt(low), this.valueAt(high)]);
  }

  private showSelection(held: Held | null): void {
    this.selection.hidden = held === null || Math.abs(held.now - held.from) < MIN_DRAG;
    if (held === null) return;
    const limit = this.width;
    const [low, high] = [Math.max(Math.min(held.from, held.now), 0), Math.min(Math.max(held.from, held.now), limit)];
    this.selection.style.cssText = `left:${low}px;width:${high - low}px`;
  }

  /** A pinch on a touch pad comes as a wheel with Ctrl. A plain wheel scrolls the page. */
  private wheel(event: WheelEvent): void {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const { left } = this.placeOf(event);
    const factor = Math.exp(event.deltaY * 0.01);
    const width = this.width;
    this.zoomTo(left - left * factor, left + (width - left) * factor);
  }

  /** What was between two fingers stays between them. */
  private zoomByFingers(): void {
    const [one, two] = [...this.held.values()];
    const spread = Math.max(Math.abs(one!.now - two!.now), 10);
    const centre = (one!.now + two!.now) / 2;
    this.pinch ??= { range: this.scene!.x, spread, centre };
    const { range, spread: spread0, centre: centre0 } = this.pinch;
    const width = this.width;
    const scale = makeScale([0, width], false, range[0], range[1] - range[0]);
    const factor = spread0 / spread;
    const low = scale(centre0 - centre * factor);
    const high = scale(centre0 + (width - centre) * factor);
    this.clampZoom([low, high]);
  }

  /** Places in CSS pixels, also outside of the plotting area. */
  private zoomTo(left: number, right: number): void {
    const [low, high] = this.scene!.x;
    const width = Math.max(this.width, 1);
    const value = (at: number): number =>
      this.look!.isLogX ? low * Math.pow(high / low, at / width) : low + ((high - low) * at) / width;
    this.clampZoom([value(left), value(right)]);
  }

  private clampZoom([low, high]: Range): void {
    const [first, last] = this.scene!.bounds;
    const range: Range = [Math.max(low, first), Math.min(high, last)];
    if (range[1] > range[0]) this.events.onZoom(range[0] <= first && range[1] >= last ? null : range);
  }
}

function xTicks({ x }: Scene, look: Look, most: number): Tick[] {
  if (look.isLogX) return logTicks(x, most);
  if (look.kind === "wall") return timeTicks(x, most);
  return look.kind === "training" ? spanTicks(x, most) : linearTicks(x, most, look.kind === "step" ? 1 : 0);
}

function paintAxes(ctx: CanvasRenderingContext2D, scene: Scene, look: Look, area: Area, yTicks: readonly Tick[]): void {
  const { ratio } = area;
  const [right, bottom] = [area.left + area.width, area.top + area.height];
  const toX = makeScale(scene.x, look.isLogX, area.left, area.width);
  const toY = makeScale(scene.y, look.isLogY, bottom, -area.height);
  const columns = xTicks(scene, look, Math.max(Math.floor(area.width / ratio / X_SPACE), 2));
  ctx.strokeStyle = look.palette.grid;
  ctx.lineWidth = Math.max(Math.round(ratio), 1);
  ctx.beginPath();
  for (const { at } of columns) {
    const x = Math.round(toX(at)) + 0.5;
    ctx.moveTo(x, area.top);
    ctx.lineTo(x, bottom);
  }
  for (const { at } of yTicks) {
    const y = Math.round(toY(at)) + 0.5;
    ctx.moveTo(area.left, y);
    ctx.lineTo(right, y);
  }
  ctx.stroke();
  ctx.fillStyle = look.palette.muted;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (const { at, label } of yTicks) ctx.fillText(label, area.left - 8 * ratio, toY(at));
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  for (const { at, label } of columns) {
    const half = ctx.measureText(label).width / 2; // the last one must not leave the picture
    ctx.fillText(label, Math.min(Math.max(toX(at), half), right + RIGHT * ratio - half - ratio), bottom + 9 * ratio);
  }
}
