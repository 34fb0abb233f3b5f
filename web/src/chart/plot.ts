/* The only module that knows uPlot. It draws axes, scales and the cursor; the curves are painted by `paint.ts`.

   uPlot gets two points, the corners of the picture, so its cost does not depend on the data. */

import uPlot from "uplot";

import type { Range, XKind } from "./axis";
import { type Area, type PaintOptions, paintScene } from "./paint";
import type { Scene } from "./scene";
import { formatLogTick, formatSpanTick, formatTick, SPAN_DISTANCES } from "./ticks";

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

const PADDING: uPlot.Padding = [8, 18, 0, 0];

export class Plot {
  private chart: uPlot | null = null;
  private scene: Scene | null = null;
  private look: Look | null = null;
  private cursorX: number | null = null;
  private readonly observer: ResizeObserver;
  private readonly touches = new Map<number, number>();
  private pinch: { range: Range; spread: number; centre: number } | null = null;

  constructor(
    private readonly root: HTMLElement,
    private readonly label: string,
    private readonly events: PlotEvents,
  ) {
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(root);
  }

  destroy(): void {
    this.observer.disconnect();
    this.chart?.destroy();
    this.chart = null;
  }

  /** Paints at once: the caller decides when. */
  paint(scene: Scene, look: Look): void {
    const before = this.look;
    this.scene = scene;
    this.look = look;
    const isOther =
      before === null || before.kind !== look.kind || before.isLogX !== look.isLogX || before.isLogY !== look.isLogY ||
      before.palette !== look.palette;
    if (isOther) {
      this.chart?.destroy();
      this.chart = null;
    }
    if (this.root.clientWidth === 0) return; // the resize paints it
    const corners: uPlot.AlignedData = [[...scene.x], [...scene.y]];
    if (this.chart === null) this.chart = this.build(corners);
    else this.chart.setData(corners);
    this.setCursor(this.cursorX);
  }

  /** Shows the cursor where another chart or the keyboard has it. */
  setCursor(x: number | null): void {
    this.cursorX = x;
    const { chart, scene } = this;
    if (chart === null || scene === null) return;
    const isInside = x !== null && x >= scene.x[0] && x <= scene.x[1];
    chart.setCursor({ left: isInside ? chart.valToPos(x, "x") : -10, top: isInside ? 0 : -10 }, false);
  }

  get canvas(): HTMLCanvasElement | null {
    return this.chart?.ctx.canvas ?? null;
  }

  private resize(): void {
    const { clientWidth: width, clientHeight: height } = this.root;
    if (width === 0 || this.scene === null || this.look === null) return;
    if (this.chart === null) this.paint(this.scene, this.look);
    else if (this.chart.width !== width || this.chart.height !== height) this.chart.setSize({ width, height });
  }

  private build(corners: uPlot.AlignedData): uPlot {
    const look = this.look!;
    const chart = new uPlot(
      {
        width: this.root.clientWidth,
        height: this.root.clientHeight,
        padding: PADDING,
        legend: { show: false },
        series: [{}, { paths: () => null, points: { show: false } }],
        scales: {
          x: { time: look.kind === "wall", distr: look.isLogX ? 3 : 1, range: () => [...this.scene!.x] },
          y: { distr: look.isLogY ? 3 : 1, range: () => [...this.scene!.y] },
        },
        axes: [xAxis(look), yAxis(look)],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false, dist: 4 },
          bind: {
            dblclick: () => () => {
              this.events.onZoom(null);
              return null;
            },
          },
        },
        hooks: {
          draw: [(u) => this.paintCurves(u)],
          setCursor: [(u) => this.moved(u)],
          setSelect: [(u) => this.selected(u)],
        },
      },
      corners,
      this.root,
    );
    chart.ctx.canvas.setAttribute("role", "img");
    chart.ctx.canvas.setAttribute("aria-label", this.label);
    chart.over.addEventListener("click", () => this.picked(chart));
    chart.over.addEventListener("wheel", (event) => this.wheel(chart, event), { passive: false });
    for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"] as const) {
      chart.over.addEventListener(kind, (event) => this.touch(chart, event));
    }
    return chart;
  }

  private paintCurves(u: uPlot): void {
    const area: Area = { ...u.bbox, ratio: uPlot.pxRatio };
    paintScene(u.ctx, this.scene!, area, this.look!);
  }

  private moved(u: uPlot): void {
    const { left = -1, top = -1 } = u.cursor;
    if (left < 0) this.events.onCursor(null, 0);
    else this.events.onCursor(u.posToVal(left, "x"), top / Math.max(u.over.clientHeight, 1));
  }

  private selected(u: uPlot): void {
    const { left, width } = u.select;
    if (width < 4) return;
    const range: Range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.events.onZoom(range);
  }

  private picked(u: uPlot): void {
    const { left = -1 } = u.cursor;
    if (left >= 0) this.events.onPick(u.posToVal(left, "x"));
  }

  /** A pinch on a touch pad comes as a wheel with Ctrl. A plain wheel scrolls the page. */
  private wheel(u: uPlot, event: WheelEvent): void {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const at = u.posToVal(event.offsetX, "x");
    const factor = Math.exp(event.deltaY * 0.01);
    const [low, high] = this.scene!.x;
    this.zoomTo([at - (at - low) * factor, at + (high - at) * factor]);
  }

  /** Two fingers zoom and move; one finger moves the cursor. */
  private touch(u: uPlot, event: PointerEvent): void {
    if (event.pointerType !== "touch") return;
    if (event.type === "pointerup" || event.type === "pointercancel") {
      this.touches.delete(event.pointerId);
      this.pinch = null;
      return;
    }
    const left = event.clientX - u.over.getBoundingClientRect().left;
    if (event.type === "pointermove" && !this.touches.has(event.pointerId)) return;
    this.touches.set(event.pointerId, left);
    const [one, two] = [...this.touches.values()];
    if (one === undefined) return;
    if (two === undefined) {
      if (event.type === "pointermove") this.events.onCursor(u.posToVal(left, "x"), 0.5);
      return;
    }
    const spread = Math.max(Math.abs(one - two), 10);
    const centre = (one + two) / 2;
    this.pinch ??= { range: this.scene!.x, spread, centre };
    const { range, spread: spread0, centre: centre0 } = this.pinch;
    const width = Math.max(u.over.clientWidth, 1);
    const span = ((range[1] - range[0]) * spread0) / spread;
    const held = range[0] + ((range[1] - range[0]) * centre0) / width; // stays under the fingers
    const low = held - (span * centre) / width;
    this.zoomTo([low, low + span]);
  }

  private zoomTo([low, high]: Range): void {
    const [first, last] = this.scene!.bounds;
    const range: Range = [Math.max(low, first), Math.min(high, last)];
    if (range[1] <= range[0]) return;
    this.events.onZoom(range[0] === first && range[1] === last ? null : range);
  }
}

function axis(look: Look): uPlot.Axis {
  return {
    stroke: look.palette.muted,
    font: look.font,
    grid: { stroke: look.palette.grid, width: 1 },
    ticks: { show: false },
  };
}

function xAxis(look: Look): uPlot.Axis {
  const base = { ...axis(look), size: 28, gap: 8, space: 64 };
  if (look.kind === "wall") return base;
  if (look.kind === "training" && !look.isLogX) {
    return { ...base, incrs: SPAN_DISTANCES, values: (_u, splits, _i, _space, by) => splits.map((at) => formatSpanTick(at, by)) };
  }
  return { ...base, values: labels(look.isLogX) };
}

function yAxis(look: Look): uPlot.Axis {
  return {
    ...axis(look),
    gap: 6,
    space: 34,
    size: (u, values) => {
      u.ctx.font = look.font;
      const widest = Math.max(...(values ?? [""]).map((text) => u.ctx.measureText(text).width), 12);
      return Math.ceil(widest / uPlot.pxRatio) + 14;
    },
    values: labels(look.isLogY),
  };
}

/** On a log axis uPlot passes null for ticks that have no room for a label. */
function labels(isLog: boolean): uPlot.Axis.DynamicValues {
  return (_u, splits, _i, _space, by) =>
    (splits as (number | null)[]).map((at) => (at === null ? "" : isLog ? formatLogTick(at) : formatTick(at, by)));
}
