// Charts as SVG elements in pixels of the screen, so that labels keep their size at any width.

import { h } from "./dom";

export type Place = readonly [number, number];

const NAMESPACE = "http://www.w3.org/2000/svg";

export function s(tag: string, attributes: Readonly<Record<string, string | number>> = {}, ...children: readonly (Node | string)[]): SVGElement {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export interface Axis {
  readonly at: (value: number) => number; // pixels
  readonly from: (pixels: number) => number;
  readonly ticks: readonly number[];
}

/** An axis from 0 or another value; ticks of bytes are powers of two, ticks of counts whole numbers. */
export function linearAxis(least: number, most: number, start: number, end: number, unit: "any" | "bytes" | "whole" = "any"): Axis {
  const span = most - least || 1;
  const smallest = span / Math.max(Math.abs(end - start) / 80, 1);
  const step = unit === "bytes" ? 2 ** Math.ceil(Math.log2(smallest)) : Math.max(roundStep(smallest), unit === "whole" ? 1 : 0);
  const ticks: number[] = [];
  for (let i = Math.ceil(least / step - 1e-9); i * step <= most + 1e-9 * span; i++) ticks.push(i * step || 0); // not -0
  return { at: (value) => start + ((value - least) / span) * (end - start), from: (x) => least + ((x - start) / (end - start)) * span, ticks };
}

/** An axis of powers of ten; both ends are positive. */
export function logAxis(least: number, most: number, start: number, end: number): Axis {
  const [low, high] = [Math.log10(least), Math.log10(most) > Math.log10(least) ? Math.log10(most) : Math.log10(least) + 1];
  const step = Math.max(1, Math.ceil((high - low) / Math.max(Math.abs(end - start) / 70, 1)));
  const ticks: number[] = [];
  for (let power = Math.ceil(low - 1e-9); power <= high + 1e-9; power += step) ticks.push(10 ** power);
  return { at: (value) => start + ((Math.log10(value) - low) / (high - low)) * (end - start), from: (x) => 10 ** (low + ((x - start) / (end - start)) * (high - low)), ticks };
}

/** The least and the most of some values, which may be more than a call takes arguments. */
export function extent(values: Iterable<number>): readonly [number, number] {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}

/** The next of 1, 2, 5, 10, ... */
export function roundStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9))!;
}

export interface Frame {
  readonly element: HTMLElement; // the figure
  readonly svg: SVGElement;
  readonly width: number;
  readonly height: number;
  readonly tip: (content: readonly string[] | null, x?: number, y?: number) => void;
}

export const LEFT = 76;
export const BOTTOM = 34;
export const TOP = 8;
export const RIGHT = 14;

/** An empty chart of the panel's width, with a box for what is under the pointer. */
export function frame(label: string, height: number): Frame {
  const width = Math.max(320, Math.min(document.documentElement.clientWidth - 60, 1800));
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label, class: "chart" });
  const box = h("div", { class: "tip", hidden: true, aria: { hidden: "true" } });
  const element = h("figure", { class: "drawing" }, h("figcaption", {}, label), svg as unknown as Node, box);
  const tip: Frame["tip"] = (content, x = 0, y = 0) => {
    box.hidden = content === null;
    if (content === null) return;
    box.replaceChildren(...content.map((line, i) => h(i ? "div" : "b", {}, line)));
    box.style.left = `${Math.max(0, Math.min(x + 12, width - box.offsetWidth - 8))}px`;
    box.style.top = `${y + 34}px`;
  };
  return { element, svg, width, height, tip };
}

/** Ticks, grid and titles of both axes. */
export function drawAxes({ svg, width, height }: Frame, x: Axis, y: Axis, format: { x: (value: number) => string; y: (value: number) => string }, title: { x: string; y: string }): void {
  for (const tick of x.ticks) {
    const place = Math.round(x.at(tick)) + 0.5;
    svg.append(s("line", { class: "grid", x1: place, x2: place, y1: TOP, y2: height - BOTTOM }));
    svg.append(s("text", { x: Math.min(place, width - 22), y: height - BOTTOM + 14, "text-anchor": "middle" }, format.x(tick)));
  }
  for (const tick of y.ticks) {
    const place = Math.round(y.at(tick)) + 0.5;
    svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: place, y2: place }));
    svg.append(s("text", { x: LEFT - 6, y: place + 4, "text-anchor": "end" }, format.y(tick)));
  }
  svg.append(s("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle", class: "axis" }, title.x));
  const middle = (TOP + height - BOTTOM) / 2;
  svg.append(s("text", { x: 12, y: middle, "text-anchor": "middle", class: "axis", transform: `rotate(-90 12 ${middle})` }, title.y));
}

/** The path of a step line, of which at most the highest value of a column of pixels is drawn. */
export function stepPath(places: readonly Place[], base: number | null): string {
  const kept: Place[] = [];
  for (const place of places) {
    const last = kept.at(-1);
    if (last && kept.length > 1 && Math.floor(place[0]) === Math.floor(last[0])) {
      if (place[1] < last[1]) kept[kept.length - 1] = [last[0], place[1]];
    } else {
      kept.push(place);
    }
  }
  if (!kept.length) return "";
  const parts = [`M${kept[0]![0].toFixed(1)} ${kept[0]![1].toFixed(1)}`];
  for (const [x, y] of kept.slice(1)) parts.push(`H${x.toFixed(1)}V${y.toFixed(1)}`);
  if (base !== null) parts.push(`V${base}H${kept[0]![0].toFixed(1)}Z`);
  return parts.join("");
}

/** Whether a label fits; it then keeps its space. */
export class Labels {
  private readonly taken: (readonly [number, number, number, number])[] = [];

  take(x: number, y: number, width: number, height = 13): boolean {
    if (this.taken.some(([left, top, w, t]) => x < left + w && left < x + width && y < top + t && top < y + height)) return false;
    this.taken.push([x, y, width, height]);
    return true;
  }
}
