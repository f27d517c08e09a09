// The roofline: operations or lines by their FLOPs per byte and their rate, below the chip's ceilings.

import type { Capture, Kind } from "./data";
import { button, h, select } from "./dom";
import { bytes, flops, picoseconds, seconds, share } from "./format";
import { type Column, grid, number } from "./grid";
import type { PanelActions, Shown } from "./panel";
import { type Sums, valueOf } from "./query";
import { drawAxes, frame, Labels, LEFT, logAxis, BOTTOM, RIGHT, s, TOP } from "./svg";

interface Point {
  readonly name: string;
  readonly kind: Kind;
  self_s: number;
  flops: number | null; // of the operations with a known number
  bytes: number | null;
  ideal_s: number | null;
  readonly bounds: Set<string>;
}

const HEIGHT = 380;
const LARGEST = 14; // radius in pixels
const MOST_LABELS = 14;

/** Sums by operation or line, with the time at the chip's peaks. */
export function points(capture: Capture, found: Sums, by: "op" | "line"): Point[] {
  const groups = new Map<string, Point>();
  capture.kinds.forEach((kind, i) => {
    if (!found.count[i] || kind.type !== "operation") return;
    const name = valueOf(kind, by);
    const point: Point = groups.get(name) ?? { name, kind, self_s: 0, flops: null, bytes: null, ideal_s: null, bounds: new Set() };
    groups.set(name, point);
    const times = found.times[i]!;
    point.self_s += found.self[i]! * 1e-12;
    if (kind.flops != null) point.flops = (point.flops ?? 0) + kind.flops * times;
    if (kind.bytes != null) point.bytes = (point.bytes ?? 0) + kind.bytes * times;
    if (kind.ideal != null) point.ideal_s = (point.ideal_s ?? 0) + kind.ideal * times;
    if (kind.bound) point.bounds.add(kind.bound);
  });
  return [...groups.values()].sort((a, b) => b.self_s - a.self_s);
}

const ratio = (part: number | null, whole: number | null): number | null => (part !== null && whole ? part / whole : null);

export function rooflinePanel(capture: Capture, { view, found }: Shown, actions: PanelActions): HTMLElement {
  const all = points(capture, found, view.points);
  const { roof } = capture;
  const controls = h(
    "div",
    { class: "controls" },
    select("points are", [["op", "operations"], ["line", "lines"]], view.points, (value) => actions.change({ points: value as typeof view.points })),
    h("span", { class: "help" }, roof ? `${roof.chip ?? "unknown chip"}. ${roof.note}` : `The chip's peaks could not be read. ${capture.failures["roof"] ?? ""}`),
  );
  if (!all.length) return h("div", {}, controls, h("p", { class: "empty" }, "No operation of the selection matches."));
  const columns: Column<Point>[] = [
    { key: "name", title: view.points === "op" ? "name" : "line", kind: "text", value: (row) => row.name || "(none)", show: (row) => button(row.name || "(none)", () => actions.filter(view.points, row.name), { class: "link", title: "Show only these events" }) },
    number("self", "self", (row) => row.self_s, seconds),
    number("flops", "FLOPs", (row) => row.flops, flops),
    number("bytes", "bytes", (row) => row.bytes, bytes),
    number("flops_s", "FLOP/s", (row) => ratio(row.flops, row.self_s), flops),
    number("bytes_s", "B/s", (row) => ratio(row.bytes, row.self_s), bytes),
    number("intensity", "FLOPs per byte", (row) => ratio(row.flops, row.bytes), (value) => String(Number(value.toPrecision(3)))),
    number("ideal", "ideal", (row) => row.ideal_s, seconds),
    number("roof", "ideal % of self", (row) => ratio(row.ideal_s, row.self_s), share),
    { key: "bound", title: "bound", kind: "text", value: (row) => [...row.bounds].sort().join(", ") },
    ...(view.points === "op" ? [{ key: "line", title: "line", kind: "text", value: (row: Point) => row.kind.line ?? "", show: (row: Point) => actions.line(row.kind) } as const] : []),
  ];
  return h("div", {}, controls, chart(capture, all, actions, view.points), grid("roofline", all, columns, view, actions, "-self"));
}

function chart(capture: Capture, all: readonly Point[], actions: PanelActions, by: "op" | "line"): HTMLElement {
  const drawn = all.filter((point) => point.flops && point.bytes && point.self_s);
  if (!drawn.length) return h("p", { class: "empty" }, "No operation of the selection has known FLOPs: nothing can be drawn.");
  const without = all.filter((point) => !drawn.includes(point)).reduce((sum, point) => sum + point.self_s, 0);
  const bandwidth = capture.roof?.bytes_s || null;
  const peaks = mergedPeaks(capture.roof?.flops_s ?? {});
  const intensities = drawn.map((point) => point.flops! / point.bytes!);
  const rates = drawn.map((point) => point.flops! / point.self_s);
  const ridges = bandwidth ? peaks.map(([peak]) => peak / bandwidth) : [];
  const figure = frame("Roofline: FLOP/s by FLOPs per byte, size by time", HEIGHT);
  const { svg, width, height, tip } = figure;
  const x = logAxis(Math.min(...intensities, ...ridges) / 2, Math.max(...intensities, ...ridges) * 4, LEFT, width - RIGHT);
  const top = Math.max(...rates, ...peaks.map(([peak]) => peak)) * 2.5;
  const y = logAxis(Math.min(...rates) / 2, top, height - BOTTOM, TOP);
  drawAxes(figure, x, y, { x: (value) => flops(value), y: (value) => flops(value) }, { x: "FLOPs per byte", y: "FLOP/s" });
  const labels = new Labels();
  const right = width - RIGHT;
  // Ceilings: the memory's slope up to the ridge, and a level for each peak.
  peaks.forEach(([peak, names], i) => {
    const level = y.at(peak);
    const ridge = bandwidth ? x.at(peak / bandwidth) : LEFT;
    svg.append(s("line", { class: "roof", x1: Math.max(ridge, LEFT), x2: right, y1: level, y2: level }));
    const text = `${names.join(", ")} ${flops(peak)}FLOP/s`;
    const size = text.length * 6.2;
    // To the left of the label of a higher peak that is close.
    let end = right;
    while (end - size > LEFT && !labels.take(end - size, level - 15, size)) end -= 12;
    svg.append(s("text", { class: "ceiling", x: end - 2, y: level - 4, "text-anchor": "end" }, text));
    if (i || !bandwidth) return;
    const low = x.from(LEFT);
    const clipped = Math.max(bandwidth * low, y.from(height - BOTTOM));
    svg.append(s("line", { class: "roof", x1: x.at(clipped / bandwidth), y1: y.at(clipped), x2: ridge, y2: level }));
    const slope = Math.atan2(level - y.at(clipped), ridge - x.at(clipped / bandwidth)) * (180 / Math.PI);
    const [tx, ty] = [(x.at(clipped / bandwidth) + ridge) / 2, (y.at(clipped) + level) / 2 - 6];
    svg.append(s("text", { class: "ceiling", x: tx, y: ty, "text-anchor": "middle", transform: `rotate(${slope.toFixed(2)} ${tx} ${ty})` }, `memory ${bytes(bandwidth)}/s`));
  });
  const longest = Math.max(...drawn.map((point) => point.self_s));
  drawn.forEach((point, i) => {
    const [cx, cy] = [x.at(intensities[i]!), y.at(rates[i]!)];
    const radius = 3 + (LARGEST - 3) * Math.sqrt(point.self_s / longest);
    const reached = ratio(point.ideal_s, point.self_s);
    const said = [point.name || "(none)", `${seconds(point.self_s)}, ${flops(rates[i]!)}FLOP/s at ${Number(intensities[i]!.toPrecision(3))} FLOPs per byte`, ...(reached === null ? [] : [`${share(reached)} of the roof (${[...point.bounds].join(", ")})`]), ...(by === "op" && point.kind.line ? [point.kind.line] : [])];
    const dot = s("circle", { class: `dot ${point.bounds.has("compute") ? "compute" : "memory"}`, cx, cy, r: radius, tabindex: i < 40 ? 0 : -1, role: "button", "aria-label": said.join(", ") });
    const show = () => tip(said, cx, cy);
    dot.addEventListener("pointerenter", show);
    dot.addEventListener("focus", show);
    dot.addEventListener("pointerleave", () => tip(null));
    dot.addEventListener("blur", () => tip(null));
    dot.addEventListener("click", () => actions.filter(by, point.name));
    dot.addEventListener("keydown", (event) => (event as KeyboardEvent).key === "Enter" && actions.filter(by, point.name));
    svg.append(dot);
  });
  let count = 0;
  drawn.forEach((point, i) => {
    const text = short(point, by);
    const size = text.length * 6;
    const [cx, cy] = [x.at(intensities[i]!), y.at(rates[i]!)];
    const radius = 3 + (LARGEST - 3) * Math.sqrt(point.self_s / longest);
    const left = cx + radius + 3 + size > right ? cx - radius - 3 - size : cx + radius + 3;
    if (count >= MOST_LABELS || !labels.take(left, cy - 7, size)) return;
    count++;
    svg.append(s("text", { class: "label", x: left, y: cy + 4 }, text));
  });
  const note = without > 0 ? h("p", { class: "help" }, `${picoseconds(without * 1e12)} of the selection are of operations without FLOPs, which only the table has.`) : "";
  figure.element.append(h("p", { class: "help" }, h("span", { class: "swatch compute" }), "bound by compute ", h("span", { class: "swatch memory" }), "bound by memory, or unknown"), note);
  return figure.element;
}

function short(point: Point, by: "op" | "line"): string {
  const name = by === "op" ? point.kind.name : point.name.split("/").at(-1) || "(none)";
  return name.length > 28 ? `${name.slice(0, 27)}…` : name;
}

/** Peaks in FLOP/s, the highest first, with the dtypes that share them. */
function mergedPeaks(peaks: Readonly<Record<string, number>>): (readonly [number, string[]])[] {
  const found = new Map<number, string[]>();
  for (const [dtype, peak] of Object.entries(peaks)) if (peak > 0) found.set(peak, [...(found.get(peak) ?? []), dtype]);
  return [...found].sort((a, b) => b[0] - a[0]);
}
