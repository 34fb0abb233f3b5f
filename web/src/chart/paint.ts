/* Paints the curves and marks of a scene onto a canvas. */

import type { Range } from "./axis";
import { type Line, type PlacedMark, type Scene, visible } from "./scene";

export interface Palette {
  text: string;
  muted: string;
  grid: string;
  bad: string;
  good: string;
  accent: string;
  surface: string;
}

/** The plotting area in canvas pixels. */
export interface Area {
  left: number;
  top: number;
  width: number;
  height: number;
  /** Canvas pixels per CSS pixel. */
  ratio: number;
}

export interface PaintOptions {
  isLogX: boolean;
  isLogY: boolean;
  isSmoothed: boolean;
  highlight: string | null;
  palette: Palette;
}

const MAX_BANDS = 8; // more bands over each other show nothing
const MAX_THICK = 20;

type Scale = (value: number) => number;

/** From values to pixels. */
export function makeScale([low, high]: Range, isLog: boolean, from: number, length: number): Scale {
  if (!isLog) {
    const factor = length / (high - low);
    return (value) => from + (value - low) * factor;
  }
  const start = Math.log(low);
  const factor = length / (Math.log(high) - start);
  return (value) => from + (Math.log(value) - start) * factor;
}

export function paintScene(ctx: CanvasRenderingContext2D, scene: Scene, area: Area, options: PaintOptions): void {
  const toX = makeScale(scene.x, options.isLogX, area.left, area.width);
  const toY = makeScale(scene.y, options.isLogY, area.top + area.height, -area.height);
  ctx.save();
  ctx.beginPath();
  ctx.rect(area.left, area.top, area.width, area.height);
  ctx.clip();
  ctx.lineJoin = "round";
  paintAttempts(ctx, scene.marks, toX, area, options.palette);
  const brush = new Brush(ctx, scene.x, toX, toY, area, options);
  const isMany = scene.lines.length > MAX_THICK;
  const isBanded = scene.lines.length <= MAX_BANDS;
  const { highlight } = options;
  const later: Line[] = [];
  for (const line of scene.lines) {
    if (line.source.runId === highlight) later.push(line);
    else brush.line(line, highlight === null ? 1 : 0.2, isMany ? 1 : 1.5, isBanded && highlight === null);
  }
  for (const line of later) brush.line(line, 1, 2, true);
  ctx.restore();
  paintMarks(ctx, scene.marks, toX, area, options.palette);
}

class Brush {
  constructor(
    private readonly ctx: CanvasRenderingContext2D,
    private readonly range: Range,
    private readonly toX: Scale,
    private readonly toY: Scale,
    private readonly area: Area,
    private readonly options: PaintOptions,
  ) {}

  line(line: Line, alpha: number, width: number, isBanded: boolean): void {
    const { ctx, area, options } = this;
    const { curve, colour } = line.source;
    ctx.strokeStyle = ctx.fillStyle = colour;
    for (const part of line.discarded) {
      ctx.globalAlpha = alpha * 0.55;
      ctx.setLineDash([4 * area.ratio, 3 * area.ratio]);
      this.stroke(part.xs, part.values, 1);
      ctx.setLineDash([]);
    }
    if (isBanded && curve.width > 1) {
      ctx.globalAlpha = alpha * 0.16;
      this.band(line);
    }
    if (options.isSmoothed) {
      ctx.globalAlpha = alpha * 0.3;
      this.stroke(line.xs, curve.values, 1);
    }
    ctx.globalAlpha = alpha;
    this.stroke(line.xs, line.smoothed, width);
    this.dots(line, width);
    this.nonFinite(line, alpha);
    ctx.globalAlpha = 1;
  }

  private canShow(value: number): boolean {
    return Number.isFinite(value) && (!this.options.isLogY || value > 0);
  }

  private stroke(xs: Float64Array, values: readonly number[], width: number): void {
    const { ctx, toX, toY } = this;
    const [from, to] = visible(xs, this.range);
    let isDown = false;
    ctx.lineWidth = width * this.area.ratio;
    ctx.beginPath();
    for (let i = from; i <= to; i++) {
      const value = values[i]!;
      if (!this.canShow(value)) {
        isDown = false;
      } else if (isDown) {
        ctx.lineTo(toX(xs[i]!), toY(value));
      } else {
        ctx.moveTo(toX(xs[i]!), toY(value));
        isDown = true;
      }
    }
    ctx.stroke();
  }

  /** Between min and max of each bucket; a bucket without any finite value leaves a gap. */
  private band({ xs, source: { curve } }: Line): void {
    const { ctx, toX, toY } = this;
    const [from, to] = visible(xs, this.range);
    const floor = this.area.top + this.area.height;
    for (let start = from; start <= to; start++) {
      if (!this.canShow(curve.maxs[start]!)) continue;
      let end = start;
      while (end < to && this.canShow(curve.maxs[end + 1]!)) end += 1;
      ctx.beginPath();
      for (let i = start; i <= end; i++) ctx.lineTo(toX(xs[i]!), toY(curve.maxs[i]!));
      for (let i = end; i >= start; i--) {
        ctx.lineTo(toX(xs[i]!), this.canShow(curve.mins[i]!) ? toY(curve.mins[i]!) : floor);
      }
      ctx.fill();
      start = end;
    }
  }

  /** Points that stand alone, and all of them where there is room. */
  private dots({ xs, source: { curve } }: Line, width: number): void {
    const { ctx, toX, toY, area } = this;
    const [from, to] = visible(xs, this.range);
    const isSparse = to - from < area.width / area.ratio / 14;
    const size = (width + 0.6) * area.ratio;
    ctx.beginPath();
    for (let i = from; i <= to; i++) {
      const value = curve.values[i]!;
      if (!this.canShow(value)) continue;
      const isAlone = !this.canShow(curve.values[i - 1] ?? NaN) && !this.canShow(curve.values[i + 1] ?? NaN);
      if (!isSparse && !isAlone) continue;
      ctx.moveTo(toX(xs[i]!) + size, toY(value));
      ctx.arc(toX(xs[i]!), toY(value), size, 0, 2 * Math.PI);
    }
    ctx.fill();
  }

  /** A cross at the edge where a value is NaN or infinite: at the top for +infinity, else at the bottom. */
  private nonFinite({ xs, source: { curve } }: Line, alpha: number): void {
    const { ctx, toX, area } = this;
    const [from, to] = visible(xs, this.range);
    const size = 3 * area.ratio;
    let previous = -Infinity;
    ctx.globalAlpha = alpha;
    ctx.strokeStyle = this.options.palette.bad;
    ctx.lineWidth = 1.5 * area.ratio;
    ctx.beginPath();
    for (let i = from; i <= to; i++) {
      const value = curve.values[i]!;
      if (Number.isFinite(value)) continue;
      const x = toX(xs[i]!);
      if (x - previous < size) continue;
      previous = x;
      const y = value === Infinity ? area.top + 2 * size : area.top + area.height - 4 * size;
      ctx.moveTo(x - size, y - size);
      ctx.lineTo(x + size, y + size);
      ctx.moveTo(x - size, y + size);
      ctx.lineTo(x + size, y - size);
    }
    ctx.stroke();
  }
}

const LINES = new Set(["attempt", "kill", "resume", "failure", "promotion"]);

/** A thin line where an attempt began or ended, behind the curves. */
function paintAttempts(
  ctx: CanvasRenderingContext2D, marks: readonly PlacedMark[], toX: Scale, area: Area, palette: Palette,
): void {
  ctx.lineWidth = area.ratio;
  ctx.setLineDash([2 * area.ratio, 3 * area.ratio]);
  let previous = -Infinity;
  for (const { mark, x } of marks) {
    const at = Math.round(toX(x)) + 0.5;
    if (!LINES.has(mark.kind) || Math.abs(at - previous) < 2 * area.ratio) continue;
    previous = at;
    ctx.strokeStyle = markColour(mark.kind, palette);
    ctx.globalAlpha = 0.5;
    ctx.beginPath();
    ctx.moveTo(at, area.top);
    ctx.lineTo(at, area.top + area.height);
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
  ctx.setLineDash([]);
}

export function markColour(kind: string, palette: Palette): string {
  if (kind === "kill" || kind === "failure") return palette.bad;
  if (kind === "best" || kind === "promotion") return palette.good;
  return kind === "validation" ? palette.muted : palette.accent;
}

/** Signs: of files and values on the axis itself, of attempts at the top. Of those of one kind that would touch, only one. */
function paintMarks(
  ctx: CanvasRenderingContext2D, marks: readonly PlacedMark[], toX: Scale, area: Area, palette: Palette,
): void {
  const size = 3.5 * area.ratio;
  const previous = new Map<string, number>();
  for (const { mark, x } of marks) {
    const at = toX(x);
    if (!(at >= area.left - 1 && at <= area.left + area.width + 1)) continue;
    if (at - (previous.get(mark.kind) ?? -Infinity) < size * 2) continue;
    previous.set(mark.kind, at);
    ctx.fillStyle = ctx.strokeStyle = markColour(mark.kind, palette);
    ctx.lineWidth = (mark.kind === "removed" ? 1 : 1.5) * area.ratio;
    ctx.beginPath();
    paintSign(ctx, mark.kind, at, LINES.has(mark.kind) ? area.top : area.top + area.height, size);
  }
}

function paintSign(ctx: CanvasRenderingContext2D, kind: string, x: number, y: number, size: number): void {
  if (kind === "checkpoint" || kind === "best" || kind === "removed") {
    ctx.moveTo(x, y - size);
    ctx.lineTo(x + size, y);
    ctx.lineTo(x, y + size);
    ctx.lineTo(x - size, y);
    ctx.closePath();
    if (kind === "removed") ctx.stroke();
    else ctx.fill();
  } else if (kind === "kill" || kind === "failure") {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size);
    ctx.lineTo(x + size, y - size);
    ctx.stroke();
  } else if (kind === "promotion") {
    ctx.moveTo(x, y - size);
    ctx.lineTo(x + size, y + size * 0.7);
    ctx.lineTo(x - size, y + size * 0.7);
    ctx.fill();
  } else if (kind === "resume" || kind === "attempt") {
    ctx.moveTo(x - size * 0.7, y - size);
    ctx.lineTo(x + size, y);
    ctx.lineTo(x - size * 0.7, y + size);
    ctx.fill();
  } else {
    ctx.arc(x, y, size / 2, 0, 2 * Math.PI);
    ctx.fill();
  }
}
