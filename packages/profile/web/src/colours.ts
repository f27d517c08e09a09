// Colours of categories, from the page's style sheet, as the canvas needs them: one 32-bit number a pixel.

import { type Capture, isDerived, isSampled, type Kind } from "./data";

export type Colour = readonly [number, number, number];

export interface Palette {
  readonly paper: Colour;
  readonly raised: Colour;
  readonly rule: Colour;
  readonly ink: Colour;
  readonly faint: Colour;
  readonly accent: Colour;
  readonly kinds: readonly Colour[]; // by kind
  readonly legend: readonly (readonly [string, Colour])[];
}

const SERIES = 8;

/** Series of the phases of requests and rollouts, whose lanes are beside those of operations. */
const WORK: Readonly<Record<string, number>> = { queue: 6, prefill: 1, decode: 0, stream: 2, "engine step": 5, rollout: 0, reward: 4, "trainer step": 3, "wait for a host": 4, transfer: 2 };

export const pixel = ([red, green, blue]: Colour): number => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
export const css = ([red, green, blue]: Colour): string => `rgb(${red},${green},${blue})`;
export const mix = (a: Colour, b: Colour, share: number): Colour =>
  [0, 1, 2].map((i) => Math.round(a[i]! * share + b[i]! * (1 - share))) as unknown as Colour;

/** Black or white, whichever is easier to read on a colour. */
export const inkOn = ([red, green, blue]: Colour): string =>
  0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#10141a" : "#ffffff";

export function readPalette(capture: Capture): Palette {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string): Colour => {
    const digits = Number.parseInt(style.getPropertyValue(name).trim().slice(1), 16);
    return [digits >> 16, (digits >> 8) & 255, digits & 255];
  };
  const series = Array.from({ length: SERIES }, (_, i) => colour(`--c${i}`));
  // The categories with the most time have colours of their own, the others share the last one.
  const sums = new Float64Array(capture.kinds.length);
  const isShown = new Uint8Array(capture.kinds.length);
  for (const lane of capture.lanes) {
    if (lane.type === "steps" || (isDerived(lane) && !isSampled(lane))) continue;
    const weight = lane.type === "operations" ? 1e3 : 1;
    for (let i = lane.first; i < lane.limit; i++) {
      const kind = capture.kind[i]!;
      sums[kind]! += weight * capture.self[i]!;
      isShown[kind] = 1;
    }
  }
  const times = new Map<string, number>();
  capture.kinds.forEach(({ category = "" }, i) => isShown[i] && times.set(category, (times.get(category) ?? 0) + sums[i]!));
  const ordered = [...times].sort((a, b) => b[1] - a[1]).map(([category]) => category);
  const colours = new Map(ordered.map((category, i) => [category, series[Math.min(i, SERIES - 1)]!]));
  const paper = colour("--paper");
  const faint = colour("--faint");
  const work = (category: string): Colour => series[WORK[category] ?? SERIES - 1]!;
  const of = (kind: Kind): Colour => (kind.type === "work" ? work(kind.category!) : kind.type === "step" ? mix(faint, paper, 0.45) : colours.get(kind.category ?? "")!);
  const legend = ordered.slice(0, SERIES - 1).map((category) => [category, colours.get(category)!] as const);
  if (ordered.length >= SERIES) {
    const rest = ordered.length === SERIES ? ordered[SERIES - 1]! : `${ordered.length - SERIES + 1} other categories`;
    legend.push([rest, series[SERIES - 1]!]);
  }
  const phases = new Set(capture.kinds.flatMap((kind) => (kind.type === "work" ? [kind.category!] : [])));
  for (const category of phases) legend.push([category, work(category)]);
  return {
    paper,
    raised: colour("--raised"),
    rule: colour("--rule"),
    ink: colour("--ink"),
    faint,
    accent: colour("--link"),
    kinds: capture.kinds.map((kind) => of(kind) ?? series[SERIES - 1]!),
    legend,
  };
}
