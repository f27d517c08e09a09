// The timeline: lanes of events on a canvas, with an overview of the whole capture above it.
//
// Rectangles are written into an array of pixels, at most one a row and a column of the screen, so that a frame costs the
// same however many events are narrower than a pixel. Labels are drawn over them.

import { type Colour, css, inkOn, mix, type Palette, pixel } from "./colours";
import { type Allocator, type Capture, firstEndingAfter, isSampled, type Lane, laneOf, targetsOf } from "./data";
import { h } from "./dom";
import { bytes, picoseconds } from "./format";
import { isChosen, isGroup } from "./query";
import { extent, stepPath } from "./svg";
import type { Range, View } from "./view";

const isNarrow = innerWidth < 700; // as a phone's screen is
const GUTTER = isNarrow ? 112 : 176; // CSS pixels of the lanes' names
const LONGEST_NAME = isNarrow ? 13 : 22; // letters
const RULER = 20;
const ROW = 15;
const FOLDED = 5; // height of a row of a folded lane
const HEAD = 19; // height of a group's name
const MEMORY = 30; // height of an allocator's memory
const MOST_ARROWS = 60; // of a window; the chosen event has its arrows in any case
const PAD = 3; // below a lane
const NARROWEST_LABEL = 28;
const MOST_LABELS = 2500;
const LETTER = 6.1; // average width of a letter of a label
const TALLEST = 0.48; // share of the screen
const SHORTEST = 100; // picoseconds: no further zoom
const FOLDED_NAMES = /^(tf_|pjrt_|py_xla|Host Threads|XLA|Eigen)/;
const FONT = "11px system-ui, sans-serif";

interface Strip {
  readonly group: string;
  readonly lane: Lane | null; // null for the name of a group, and for the memory of an allocator
  readonly memory?: Allocator;
  readonly top: number;
  readonly row: number; // height of a row
  readonly height: number;
}

export interface TimelineActions {
  window(range: Range | null): void;
  selection(range: Range | null): void;
  event(event: number | null): void;
}

export class Timeline {
  readonly element: HTMLElement;
  readonly canvas = h("canvas");
  private readonly scroller = h("div", { class: "lanes" });
  private readonly spacer = h("div", { class: "space" });
  private readonly overview = h("canvas", { class: "overview", aria: { hidden: "true" } });
  private readonly tip = h("div", { class: "tip", hidden: true, aria: { hidden: "true" } });
  private readonly toggled = new Set<string>();
  private readonly ordered: readonly Lane[]; // of a host, the program's own threads first
  private strips: readonly Strip[] = [];
  private window: Range;
  private view: View;
  private mask: Uint8Array = new Uint8Array();
  private range: Range | null = null;
  private colours: { full: Uint32Array; css: readonly Colour[] } = { full: new Uint32Array(), css: [] };
  private image: ImageData | null = null;
  private busy: HTMLCanvasElement | null = null;
  private drag: { kind: "select" | "pan" | "overview"; x: number; y: number; time: number; window: Range; moved: boolean } | null = null;
  private scheduled = false;

  constructor(
    private readonly capture: Capture,
    private palette: Palette,
    private readonly actions: TimelineActions,
    view: View,
  ) {
    this.view = view;
    const groups = [...new Set(capture.lanes.map((lane) => lane.group))];
    const isRuntimes = (lane: Lane) => Number(FOLDED_NAMES.test(lane.name));
    this.ordered = [...capture.lanes].sort(
      (a, b) => groups.indexOf(a.group) - groups.indexOf(b.group) || isRuntimes(a) - isRuntimes(b) || a.index - b.index,
    );
    this.window = this.whole;
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", "Timeline of events");
    this.canvas.setAttribute("aria-describedby", "timeline-help");
    this.spacer.append(this.canvas); // whose height scrolls, while the canvas stays
    this.scroller.append(this.spacer);
    this.element = h("div", { class: "timeline" }, this.overview, this.scroller, this.tip);
    this.layout();
    this.listen();
  }

  /** The whole capture, with a little space at its edges. */
  get whole(): Range {
    const { from, to } = this.capture;
    return [from - (to - from) * 0.004, to + (to - from) * 0.004];
  }

  get visible(): Range {
    return this.window;
  }

  show(view: View, range: Range | null, mask: Uint8Array): void {
    const all = !mask.includes(0) && !view.device;
    const isOther = this.view.device !== view.device;
    this.view = view;
    this.mask = mask;
    this.range = range;
    this.window = view.window ?? (range ? this.around(range) : this.whole);
    const faded = this.palette.kinds.map((colour, i) => (all || mask[i] ? colour : mix(colour, this.palette.paper, 0.16)));
    this.colours = { full: Uint32Array.from(faded, pixel), css: faded };
    if (isOther) this.layout();
    this.redraw();
  }

  /** Forgets the drawing of the whole capture, whose events have moved. */
  forget(): void {
    this.busy = null;
  }

  repaint(palette: Palette): void {
    this.palette = palette;
    this.forget();
    this.show(this.view, this.range, this.mask);
  }

  /** Scrolls and pans so that an event is on the screen. */
  reveal(event: number): void {
    const lane = laneOf(this.capture, event);
    if (this.isFolded(lane)) {
      this.toggled.has(this.key(lane)) ? this.toggled.delete(this.key(lane)) : this.toggled.add(this.key(lane));
      this.layout();
    }
    const strip = this.strips.find((each) => each.lane === lane);
    if (strip) {
      const top = strip.top + this.capture.row[event]! * strip.row;
      const seen = this.scroller.clientHeight - RULER;
      if (top < this.scroller.scrollTop || top + strip.row > this.scroller.scrollTop + seen) {
        this.scroller.scrollTop = Math.max(0, top - seen / 2);
      }
    }
    const [start, end] = [this.capture.start[event]!, this.capture.end[event]!];
    const [from, to] = this.window;
    if (end < from || start > to || end - start < (to - from) / 5000) {
      const length = Math.max(Math.min(to - from, (end - start) * 200), (end - start) * 1.5, SHORTEST);
      const middle = (start + end) / 2;
      this.move([middle - length / 2, middle + length / 2]);
    }
    this.redraw();
  }

  /** An event beside another one: on its row, or on the nearest row above or below that has any. */
  neighbour(event: number, sign: 1 | -1, axis: "row" | "column"): number | null {
    const { capture } = this;
    const lane = laneOf(capture, event);
    if (axis === "column") {
      for (let i = event + sign; i >= lane.first && i < lane.limit; i += sign) if (capture.row[i] === capture.row[event]) return i;
      return null;
    }
    const middle = (Math.max(capture.start[event]!, this.window[0]) + Math.min(capture.end[event]!, this.window[1])) / 2;
    const lanes = this.strips.flatMap((strip) => (strip.lane ? [strip.lane] : []));
    let place = lanes.indexOf(lane);
    let row = capture.row[event]! + sign;
    for (; place >= 0 && place < lanes.length; place += sign, row = sign === 1 ? 0 : (lanes[place]?.rows ?? 0) - 1) {
      for (; row >= 0 && row < lanes[place]!.rows; row += sign) {
        const found = this.nearest(lanes[place]!, row, middle);
        if (found !== null) return found;
      }
    }
    return null;
  }

  zoom(factor: number, at?: number): void {
    const [from, to] = this.window;
    const centre = at ?? (from + to) / 2;
    const length = Math.max((to - from) * factor, SHORTEST);
    const start = centre - ((centre - from) / (to - from)) * length;
    this.move([start, start + length]);
  }

  pan(share: number): void {
    const [from, to] = this.window;
    this.move([from + (to - from) * share, to + (to - from) * share]);
  }

  fit(range: Range): void {
    this.move(this.around(range));
  }

  private around([from, to]: Range): Range {
    return [from - (to - from) * 0.08, to + (to - from) * 0.08];
  }

  private move([from, to]: Range): void {
    const [first, last] = this.whole;
    const length = Math.min(to - from, last - first);
    const start = Math.min(Math.max(from, first), last - length);
    this.window = [start, start + length];
    this.actions.window(length >= last - first ? null : this.window);
    this.redraw();
  }

  private key(lane: Lane): string {
    return `${lane.group}\0${lane.name}`;
  }

  private isFolded(lane: Lane): boolean {
    // A thread that waits for the whole capture has one event a row.
    const isStill = isSampled(lane) && lane.limit - lane.first === lane.rows;
    return (isStill || FOLDED_NAMES.test(lane.name)) !== this.toggled.has(this.key(lane));
  }

  private layout(): void {
    const strips: Strip[] = [];
    let top = 0;
    let group: string | null = null;
    const head = (name: string) => {
      strips.push({ group: name, lane: null, top, row: HEAD, height: HEAD });
      top += HEAD;
    };
    const memory = (allocators: readonly Allocator[]) => {
      for (const each of allocators) {
        strips.push({ group: each.device, lane: null, memory: each, top, row: MEMORY, height: MEMORY + PAD });
        top += MEMORY + PAD;
      }
    };
    const groups = new Set(this.ordered.map((lane) => lane.group));
    for (const lane of this.ordered) {
      if (!isChosen(lane, this.view)) continue;
      if (lane.group !== group) {
        group = lane.group;
        head(group);
        if (!this.toggled.has(`${lane.group}\0`)) memory(this.capture.allocators.filter((each) => each.device === lane.group));
      }
      if (this.toggled.has(`${group}\0`)) continue;
      const row = this.isFolded(lane) ? FOLDED : ROW;
      // A folded lane is as high as its name; its rows lie over each other.
      const height = (this.isFolded(lane) ? 13 : row * lane.rows) + PAD;
      strips.push({ group, lane, top, row, height });
      top += height;
    }
    for (const each of this.capture.allocators) {
      if (groups.has(each.device) || !isGroup(each.device, this.view)) continue;
      head(each.device);
      if (!this.toggled.has(`${each.device}\0`)) memory([each]);
    }
    this.strips = strips;
    this.spacer.style.height = `${top + RULER}px`;
    // As high as its lanes, up to half of the screen; then the reader may drag its corner.
    if (!this.scroller.style.height) this.scroller.style.height = `${Math.min(Math.max(top + RULER + 2, 120), innerHeight * TALLEST)}px`;
    this.redraw();
  }

  redraw(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  private draw(): void {
    const width = this.scroller.clientWidth;
    const height = this.scroller.clientHeight;
    if (width <= GUTTER || height <= RULER) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    resize(this.canvas, width, height, ratio);
    const context = this.canvas.getContext("2d", { alpha: false })!;
    const [across, down] = [this.canvas.width, this.canvas.height];
    if (this.image?.width !== across || this.image.height !== down) this.image = new ImageData(across, down);
    const pixels = new Uint32Array(this.image.data.buffer);
    const { palette } = this;
    pixels.fill(pixel(palette.paper));
    const labels = this.fill(pixels, across, down, ratio);
    context.putImageData(this.image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.label(context, labels, ratio);
    this.allocators(context, width);
    this.names(context, width, height);
    this.arrows(context, width, height);
    this.marks(context, width, height);
    this.ruler(context, width);
    this.drawOverview(width, ratio);
  }

  /** Writes the rectangles of all visible events, and returns the wide ones for their labels. */
  private fill(pixels: Uint32Array, across: number, down: number, ratio: number): number[] {
    const { capture, colours } = this;
    const [from, to] = this.window;
    const left = Math.round(GUTTER * ratio);
    const scale = (across - left) / (to - from);
    const labels: number[] = [];
    for (const strip of this.strips) {
      const { lane } = strip;
      const top = Math.round((strip.top + RULER - this.scroller.scrollTop) * ratio);
      if (!lane || top > down || top + strip.height * ratio < RULER * ratio) continue;
      const isFolded = this.isFolded(lane);
      const rowHeight = Math.round((isFolded ? 11 : strip.row) * ratio);
      const fillHeight = rowHeight - Math.max(1, Math.round(ratio));
      const reached = new Int32Array(lane.rows).fill(-1); // last column of each row that has its colour
      for (let i = firstEndingAfter(capture, lane, from); i < lane.limit; i++) {
        const start = capture.start[i]!;
        if (start >= to) break;
        const end = capture.end[i]!;
        if (end < from) continue;
        const first = Math.max(left, left + Math.floor((start - from) * scale));
        const row = isFolded ? 0 : capture.row[i]!;
        let limit = Math.min(across, left + Math.floor((end - from) * scale));
        const kind = capture.kind[i]!;
        if (limit - first < 2) {
          // Narrower than two columns: the first event of a column is drawn, or the first that is searched for.
          limit = first + 1;
          if (reached[row] === first && !(this.isFiltered && this.mask[kind])) continue;
          reached[row] = first;
        } else {
          limit -= limit - first > 3 ? 1 : 0; // a gap between neighbours
        }
        const y = top + row * rowHeight;
        const colour = colours.full[kind]!;
        const last = Math.min(y + fillHeight, down) * across;
        for (let line = Math.max(y, 0) * across; line < last; line += across) {
          if (limit - first === 1) pixels[line + first] = colour;
          else pixels.fill(colour, line + first, line + limit);
        }
        if (!isFolded && limit - first > NARROWEST_LABEL * ratio && labels.length < MOST_LABELS * 4) labels.push(first, limit, y, i);
      }
    }
    return labels;
  }

  private get isFiltered(): boolean {
    return this.view.query !== "" || Object.keys(this.view.where).length > 0;
  }

  private label(context: CanvasRenderingContext2D, labels: readonly number[], ratio: number): void {
    context.font = FONT;
    context.textBaseline = "middle";
    const inks = new Map<number, string>();
    for (let place = 0; place < labels.length; place += 4) {
      const kind = this.capture.kind[labels[place + 3]!]!;
      if (!inks.has(kind)) inks.set(kind, inkOn(this.colours.css[kind]!));
      const left = labels[place]! / ratio;
      const letters = Math.floor((labels[place + 1]! / ratio - left - 6) / LETTER);
      const { name } = this.capture.kinds[kind]!;
      const text = name.length > letters ? `${name.slice(0, Math.max(letters - 1, 1))}…` : name;
      context.fillStyle = inks.get(kind)!;
      context.globalAlpha = this.mask[kind] ? 1 : 0.45;
      context.fillText(text, left + 3, labels[place + 2]! / ratio + ROW / 2);
    }
    context.globalAlpha = 1;
  }

  private names(context: CanvasRenderingContext2D, width: number, height: number): void {
    const { palette } = this;
    context.fillStyle = css(palette.paper);
    context.fillRect(0, 0, GUTTER, height);
    context.font = FONT;
    for (const strip of this.strips) {
      const top = strip.top + RULER - this.scroller.scrollTop;
      if (top > height || top + strip.height < RULER) continue;
      if (strip.memory) {
        context.fillStyle = css(palette.faint);
        context.fillText("memory", 18, top + 9);
        context.fillText(`to ${bytes(extent(strip.memory.allocated)[1])}`, 18, top + 22);
      } else if (strip.lane) {
        context.fillStyle = css(palette.faint);
        context.fillText(shortened(strip.lane.name, LONGEST_NAME), 18, top + Math.min(strip.height - PAD, ROW) / 2 + 0.5);
        const canFold = strip.lane.rows > 1 || this.isFolded(strip.lane);
        if (canFold) context.fillText(this.isFolded(strip.lane) ? "▸" : "▾", 6, top + Math.min(strip.height - PAD, ROW) / 2);
      } else {
        context.fillStyle = css(palette.raised);
        context.fillRect(0, top, width, HEAD - 2);
        context.fillStyle = css(palette.ink);
        context.font = `600 ${FONT}`;
        context.fillText(`${this.toggled.has(`${strip.group}\0`) ? "▸" : "▾"} ${shortened(strip.group, 60)}`, 6, top + HEAD / 2 - 1);
        context.font = FONT;
      }
    }
    context.fillStyle = css(palette.rule);
    context.fillRect(GUTTER - 1, 0, 1, height);
  }

  /** Fills the memory in use of each allocator, between its least and its most. */
  private allocators(context: CanvasRenderingContext2D, width: number): void {
    context.save();
    context.beginPath();
    context.rect(GUTTER, RULER, width - GUTTER, this.scroller.clientHeight);
    context.clip();
    for (const { memory, top } of this.strips) {
      if (!memory) continue;
      const bottom = top + RULER - this.scroller.scrollTop + MEMORY;
      const [low, high] = extent(memory.allocated);
      const y = (value: number) => bottom - 2 - ((value - low) / (high - low || 1)) * (MEMORY - 6);
      const places = Array.from(memory.time, (time, i) => [this.x(time, width), y(memory.allocated[i]!)] as const);
      if (!places.length) continue;
      const path = new Path2D(stepPath([...places, [Math.max(this.x(this.capture.to, width), places.at(-1)![0]), places.at(-1)![1]]], bottom));
      context.fillStyle = css(mix(this.palette.accent, this.palette.paper, 0.45));
      context.fill(path);
    }
    context.restore();
  }

  /** Draws arrows from dispatches to the first operation on each device: of the chosen event, and of a window with few. */
  private arrows(context: CanvasRenderingContext2D, width: number, height: number): void {
    const { capture } = this;
    const { event } = this.view;
    const [from, to] = this.window;
    const pairs: (readonly [number, number])[] = [];
    const { source, target } = capture.arrows;
    for (let i = 0; i < source.length && pairs.length <= MOST_ARROWS; i++) {
      if (capture.start[target[i]!]! >= from && capture.start[source[i]!]! <= to) pairs.push([source[i]!, target[i]!]);
    }
    const own: (readonly [number, number])[] = event === null ? [] : targetsOf(capture.arrows, event).map((each) => [event, each]);
    if (event !== null && capture.dispatchedBy[event]) own.push([capture.dispatchedBy[event]! - 1, event]);
    context.save();
    context.beginPath();
    context.rect(GUTTER, RULER, width - GUTTER, height);
    context.clip();
    if (pairs.length <= MOST_ARROWS) for (const pair of pairs) this.arrow(context, width, pair, 0.4);
    for (const pair of own) this.arrow(context, width, pair, 1);
    context.restore();
  }

  private arrow(context: CanvasRenderingContext2D, width: number, [source, target]: readonly [number, number], opacity: number): void {
    const places = [source, target].map((event) => {
      const strip = this.strips.find((each) => each.lane === laneOf(this.capture, event));
      if (!strip) return null;
      const row = this.isFolded(strip.lane!) ? 0 : this.capture.row[event]! * strip.row;
      return [this.x(this.capture.start[event]!, width), strip.top + RULER - this.scroller.scrollTop + row + 6] as const;
    });
    const [a, b] = places;
    if (!a || !b) return; // a lane that the view leaves out
    const bend = Math.max(14, Math.min(60, Math.abs(b[0] - a[0]) / 2));
    context.globalAlpha = opacity;
    context.strokeStyle = context.fillStyle = css(this.palette.ink);
    context.lineWidth = opacity === 1 ? 1.6 : 1;
    context.beginPath();
    context.moveTo(a[0], a[1]);
    context.bezierCurveTo(a[0] + bend, a[1], b[0] - bend, b[1], b[0] - 4, b[1]);
    context.stroke();
    context.beginPath();
    context.moveTo(b[0], b[1]);
    context.lineTo(b[0] - 6, b[1] - 3);
    context.lineTo(b[0] - 6, b[1] + 3);
    context.fill();
    context.globalAlpha = 1;
  }

  /** Draws the selection and the frame of the chosen event. */
  private marks(context: CanvasRenderingContext2D, width: number, height: number): void {
    const { palette } = this;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    if (this.range) {
      const [left, right] = this.range.map((time) => this.x(time, width)) as [number, number];
      context.fillStyle = css(palette.accent);
      context.globalAlpha = 0.13;
      context.fillRect(left, RULER, right - left, height);
      context.globalAlpha = 1;
      context.fillRect(Math.round(left), RULER, 1, height);
      context.fillRect(Math.round(right), RULER, 1, height);
      const text = picoseconds(this.range[1] - this.range[0]);
      if (right - left > 60) context.fillText(text, (left + right) / 2 - text.length * 3, RULER + 8);
    }
    const { event } = this.view;
    const strip = event === null ? null : this.strips.find((each) => each.lane === laneOf(this.capture, event));
    if (event !== null && strip) {
      const left = this.x(this.capture.start[event]!, width);
      const right = Math.max(this.x(this.capture.end[event]!, width), left + 2);
      const folded = this.isFolded(strip.lane!);
      const top = strip.top + RULER - this.scroller.scrollTop + (folded ? 0 : this.capture.row[event]! * strip.row);
      context.strokeStyle = css(palette.ink);
      context.lineWidth = 2;
      context.strokeRect(left - 1, top - 1, right - left + 1, (folded ? 11 : ROW) + 1);
    }
    context.restore();
  }

  private ruler(context: CanvasRenderingContext2D, width: number): void {
    const { palette } = this;
    context.fillStyle = css(palette.paper);
    context.fillRect(0, 0, width, RULER);
    context.fillStyle = css(palette.faint);
    context.font = FONT;
    const [from, to] = this.window;
    const step = roundStep((to - from) / Math.max((width - GUTTER) / 110, 1));
    for (let time = Math.ceil(from / step) * step; time < to; time += step) {
      const x = Math.round(this.x(time, width));
      context.fillStyle = css(palette.rule);
      context.fillRect(x, 0, 1, RULER);
      context.fillStyle = css(palette.faint);
      if (x + 50 < width) context.fillText(formatTick(time, step), x + 4, RULER / 2);
    }
    context.fillStyle = css(palette.rule);
    context.fillRect(0, RULER - 1, width, 1);
    context.fillStyle = css(palette.faint);
    context.fillText(picoseconds(to - from), 8, RULER / 2);
  }

  private drawOverview(width: number, ratio: number): void {
    const height = 34;
    resize(this.overview, width, height, ratio);
    const context = this.overview.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (!this.busy || this.busy.width !== this.overview.width) this.busy = this.utilization(width, height, ratio);
    context.clearRect(0, 0, width, height);
    context.drawImage(this.busy, 0, 0, width, height);
    const [first, last] = this.whole;
    const at = (time: number) => GUTTER + ((time - first) / (last - first)) * (width - GUTTER);
    const [left, right] = [at(this.window[0]), Math.max(at(this.window[1]), at(this.window[0]) + 2)];
    context.fillStyle = css(this.palette.paper);
    context.globalAlpha = 0.6;
    context.fillRect(GUTTER, 0, left - GUTTER, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = css(this.palette.accent);
    context.strokeRect(left + 0.5, 0.5, Math.max(right - left - 1, 1), height - 1);
  }

  /** Share of the devices that is busy, over the whole capture. */
  private utilization(width: number, height: number, ratio: number): HTMLCanvasElement {
    const canvas = h("canvas");
    resize(canvas, width, height, ratio);
    const context = canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [first, last] = this.whole;
    const columns = Math.max(Math.floor(width - GUTTER), 1);
    const sums = new Float64Array(columns);
    const type = this.capture.lanes.some((lane) => lane.type === "operations") ? "operations" : "thread";
    const lanes = this.capture.lanes.filter((lane) => lane.type === type);
    const scale = columns / (last - first);
    for (const lane of lanes) {
      for (let i = lane.first; i < lane.limit; i++) {
        const length = this.capture.end[i]! - this.capture.start[i]!;
        const [start, end] = [(this.capture.start[i]! - first) * scale, (this.capture.end[i]! - first) * scale];
        const density = length ? this.capture.self[i]! / length : 0;
        for (let x = Math.floor(start); x <= Math.min(Math.floor(end), columns - 1); x++) {
          sums[x]! += density * (Math.min(end, x + 1) - Math.max(start, x));
        }
      }
    }
    context.fillStyle = css(mix(this.palette.accent, this.palette.paper, 0.55));
    sums.forEach((sum, x) => {
      const tall = Math.min(sum / Math.max(lanes.length, 1), 1) * (height - 4);
      context.fillRect(GUTTER + x, height - tall, 1, tall);
    });
    context.fillStyle = css(this.palette.faint);
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillText(type === "operations" ? "devices busy" : "threads busy", 8, height / 2);
    return canvas;
  }

  private x(time: number, width: number): number {
    const [from, to] = this.window;
    return GUTTER + ((time - from) / (to - from)) * (width - GUTTER);
  }

  private time(x: number): number {
    const [from, to] = this.window;
    return from + ((x - GUTTER) / (this.scroller.clientWidth - GUTTER)) * (to - from);
  }

  private nearest(lane: Lane, row: number, time: number): number | null {
    const { capture } = this;
    let best: number | null = null;
    let distance = Infinity;
    for (let i = lane.first; i < lane.limit && capture.start[i]! - time < distance; i++) {
      if (capture.row[i] !== row) continue;
      const apart = Math.max(capture.start[i]! - time, time - capture.end[i]!, 0);
      if (apart < distance) [best, distance] = [i, apart];
    }
    return best;
  }

  /** The event at a place of the canvas, the shortest of several that a pixel covers. */
  private eventAt(x: number, y: number): number | null {
    const strip = this.stripAt(y);
    if (!strip?.lane || x < GUTTER || y < RULER) return null;
    const { capture } = this;
    const folded = this.isFolded(strip.lane);
    const row = Math.floor((y - RULER + this.scroller.scrollTop - strip.top) / strip.row);
    const [from, to] = [this.time(x - 1), this.time(x + 1)];
    let best: number | null = null;
    for (let i = firstEndingAfter(capture, strip.lane, from); i < strip.lane.limit && capture.start[i]! <= to; i++) {
      if (capture.end[i]! < from || (!folded && capture.row[i] !== row)) continue;
      const isNearer = best === null || capture.end[i]! - capture.start[i]! < capture.end[best]! - capture.start[best]!;
      if (isNearer) best = i;
    }
    return best;
  }

  private stripAt(y: number): Strip | undefined {
    const place = y - RULER + this.scroller.scrollTop;
    return this.strips.find((strip) => place >= strip.top && place < strip.top + strip.height);
  }

  private listen(): void {
    const { canvas, scroller, overview } = this;
    scroller.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(scroller);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => {
      const found = this.eventAt(event.offsetX, event.offsetY);
      if (found !== null) this.fit([this.capture.start[found]!, this.capture.end[found]!]);
    });
    const centre = (event: PointerEvent) => {
      const [first, last] = this.whole;
      const at = first + ((event.offsetX - GUTTER) / (overview.clientWidth - GUTTER)) * (last - first);
      const half = (this.window[1] - this.window[0]) / 2;
      this.move([at - half, at + half]);
    };
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    overview.addEventListener("pointermove", (event) => event.buttons & 1 && centre(event));
  }

  /** Zooms at the pointer; over the names of lanes, and with Shift, it scrolls; sideways it pans. */
  private wheel(event: WheelEvent): void {
    const unit = event.deltaMode === 1 ? 20 : 1;
    const [x, y] = [event.deltaX * unit, event.deltaY * unit];
    if (event.offsetX < GUTTER && !event.shiftKey) return; // the browser scrolls
    event.preventDefault();
    if (event.shiftKey) this.scroller.scrollTop += y || x;
    else if (Math.abs(x) > Math.abs(y)) this.pan(x / (this.scroller.clientWidth - GUTTER));
    else this.zoom(Math.exp(Math.max(-240, Math.min(240, y)) * 0.0022), this.time(event.offsetX));
  }

  private press(event: PointerEvent): void {
    if (event.button > 1) return;
    const { offsetX: x, offsetY: y } = event;
    const strip = this.stripAt(y);
    if (x < GUTTER || (strip && !strip.lane && !strip.memory)) {
      if (strip && !strip.memory) this.toggle(strip);
      return;
    }
    this.canvas.setPointerCapture(event.pointerId);
    const kind = event.shiftKey || event.button === 1 ? "pan" : "select";
    this.drag = { kind, x, y, time: this.time(x), window: this.window, moved: false };
  }

  private toggle(strip: Strip): void {
    const key = strip.lane ? this.key(strip.lane) : `${strip.group}\0`;
    if (!this.toggled.delete(key)) this.toggled.add(key);
    this.layout();
  }

  private hover(event: PointerEvent): void {
    const { offsetX: x, offsetY: y } = event;
    const { drag } = this;
    if (!drag) {
      this.showTip(x, y);
      return;
    }
    this.tip.hidden = true;
    drag.moved ||= Math.abs(x - drag.x) > 3;
    if (!drag.moved) return;
    if (drag.kind === "pan") {
      const [from, to] = drag.window;
      const by = ((drag.x - x) / (this.scroller.clientWidth - GUTTER)) * (to - from);
      this.move([from + by, to + by]);
    } else {
      const time = this.time(Math.max(x, GUTTER));
      this.range = [Math.min(drag.time, time), Math.max(drag.time, time)];
      this.redraw();
    }
  }

  private release(event: PointerEvent): void {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    if (drag.kind === "select" && drag.moved && this.range) this.actions.selection(this.range);
    else if (!drag.moved) this.actions.event(this.eventAt(event.offsetX, event.offsetY));
  }

  private showTip(x: number, y: number): void {
    const found = this.eventAt(x, y);
    const memory = x < GUTTER ? undefined : this.stripAt(y)?.memory;
    this.tip.hidden = found === null && !memory;
    this.canvas.style.cursor = found === null && x >= GUTTER ? "crosshair" : "default";
    if (memory) {
      let place = 0;
      while (place + 1 < memory.time.length && memory.time[place + 1]! <= this.time(x)) place++;
      this.tip.replaceChildren(h("b", {}, `${bytes(memory.allocated[place]!)} in use`), ` ${memory.name}`);
      this.placeTip(x, y);
    }
    if (found === null) return;
    const kind = this.capture.kinds[this.capture.kind[found]!]!;
    const duration = picoseconds(this.capture.end[found]! - this.capture.start[found]!);
    const more = [kind.category, kind.layer, kind.line].filter(Boolean).join(" · ");
    this.tip.replaceChildren(h("b", {}, duration), ` ${shortened(kind.name, 90)}`, h("div", {}, more));
    this.placeTip(x, y);
  }

  private placeTip(x: number, y: number): void {
    const box = this.element.getBoundingClientRect();
    const top = this.canvas.getBoundingClientRect().top - box.top + y;
    this.tip.style.left = `${Math.min(x + 14, box.width - Math.min(this.tip.offsetWidth + 8, box.width))}px`;
    this.tip.style.top = `${top + 16}px`;
  }
}

function resize(canvas: HTMLCanvasElement, width: number, height: number, ratio: number): void {
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width === across && canvas.height === down) return;
  canvas.width = across;
  canvas.height = down;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}

const shortened = (text: string, most: number): string => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The next of 1, 2, 5, 10, ... */
function roundStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least)!;
}

/** A time with as many digits as neighbouring ticks need to differ. */
function formatTick(time: number, step: number): string {
  for (const [scale, unit] of [[1e12, "s"], [1e9, "ms"], [1e6, "us"], [1e3, "ns"]] as const) {
    if (Math.max(Math.abs(time), step) >= scale || scale === 1e3) {
      return `${(time / scale).toFixed(Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9)))} ${unit}`;
    }
  }
  return "";
}
