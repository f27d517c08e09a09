// Which events a view means, and their sums.

import { type Capture, firstEndingAfter, isDerived, type Kind, type Lane } from "./data";
import { cutSelfTimes } from "./self_times";
import { stepRanges } from "./sides";
import { FIELDS, type Field, type Range, type View } from "./view";

/** Value of a field of a kind; "" if the kind has none. */
export function valueOf(kind: Kind, field: Field): string {
  if (field === "op") return kind.type === "operation" || kind.type === "collective" ? `${kind.module}: ${kind.name}` : kind.name;
  if (field === "kernel") return kind.kernel ?? (kind.type === "operation" ? kind.name : "");
  if (field === "under" || field === "frame" || field === "change") return "";
  return kind[field] ?? "";
}

/** The path of a kind in the flame view by scope. */
export function scopePath(kind: Kind): readonly string[] {
  return [kind.module ?? "", ...(kind.scope ? kind.scope.split("/") : [])];
}

/** 1 for each kind that the view's filters and search mean, otherwise 0. */
export function matchingKinds(capture: Capture, view: View): Uint8Array {
  const wanted = FIELDS.filter((field) => view.where[field] !== undefined);
  const query = view.query.toLowerCase();
  const frames = new Set<number>();
  if (view.where.frame !== undefined) {
    capture.frames.forEach((frame, i) => `${frame.file}:${frame.line}` === view.where.frame && frames.add(i));
  }
  return Uint8Array.from(capture.kinds, (kind) => Number(wanted.every((field) => means(kind, field)) && isFound(kind)));

  function means(kind: Kind, field: Field): boolean {
    const value = view.where[field]!;
    if (field === "under") return `${scopePath(kind).join("/")}/`.startsWith(`${value}/`);
    if (field === "frame") return kind.stack !== undefined && capture.stacks[kind.stack]!.some((each) => frames.has(each));
    if (field === "change") return kind.changes?.includes(value) ?? false;
    return valueOf(kind, field) === value;
  }

  function isFound(kind: Kind): boolean {
    if (!query) return true;
    return [kind.name, kind.module, kind.line, kind.layer, kind.scope, kind.category, kind.op_name, kind.package_line].some(
      (text) => text?.toLowerCase().includes(query),
    );
  }
}

/** Lanes of a view: of one device or host, or all. */
export const isChosen = (lane: Lane, view: View): boolean => isGroup(lane.group, view);

export const isGroup = (group: string, view: View): boolean => !view.device || group === view.device;

export interface Sums {
  readonly self: Float64Array; // picoseconds by kind
  readonly times: Float64Array; // executions by kind, those that a range cuts in part
  readonly count: Uint32Array; // executions by kind that overlap the range
  readonly busy: number; // picoseconds of all of them
}

/** Sums of events by kind, of one side of a comparison or both. An event that the range cuts counts by its self time in the range. */
export function sums(capture: Capture, view: View, range: Range | null, mask: Uint8Array | null, side?: number): Sums {
  const self = new Float64Array(capture.kinds.length);
  const times = new Float64Array(capture.kinds.length);
  const count = new Uint32Array(capture.kinds.length);
  let busy = 0;
  const [from, to] = range ?? [-Infinity, Infinity];
  for (const lane of capture.lanes) {
    if (lane.type !== view.of || !isChosen(lane, view) || (side !== undefined && lane.side !== side)) continue;
    const cut = range && cutSelfTimes(capture, lane, from, to);
    for (let i = firstEndingAfter(capture, lane, from); i < lane.limit; i++) {
      const start = capture.start[i]!;
      if (start >= to) break;
      const end = capture.end[i]!;
      const kind = capture.kind[i]!;
      if (end < from || (mask && !mask[kind])) continue;
      const part = end > start ? (Math.min(end, to) - Math.max(start, from)) / (end - start) : 1;
      if (part <= 0) continue;
      const own = cut?.get(i) ?? capture.self[i]!;
      self[kind]! += own;
      busy += own;
      times[kind]! += part;
      count[kind]!++;
    }
  }
  return { self, times, count, busy };
}

export interface Total {
  readonly name: string;
  readonly self: number;
  readonly count: number;
  readonly flops: number | null;
  readonly bytes: number | null;
  readonly kind: Kind; // of most of the time
}

/** Sums by a field, the largest first. */
export function totals(capture: Capture, found: Sums, field: Field): Total[] {
  const groups = new Map<string, { self: number; count: number; flops: number | null; bytes: number | null; most: number; kind: Kind }>();
  capture.kinds.forEach((kind, i) => {
    if (!found.count[i]) return;
    const name = valueOf(kind, field);
    const group = groups.get(name) ?? { self: 0, count: 0, flops: null, bytes: null, most: -1, kind };
    group.self += found.self[i]!;
    group.count += found.count[i]!;
    if (kind.flops != null) group.flops = (group.flops ?? 0) + kind.flops * found.times[i]!;
    if (kind.bytes != null) group.bytes = (group.bytes ?? 0) + kind.bytes * found.times[i]!;
    if (found.self[i]! > group.most) [group.most, group.kind] = [found.self[i]!, kind];
    groups.set(name, group);
  });
  return [...groups].map(([name, group]) => ({ name, ...group })).sort((a, b) => b.self - a.self);
}

/** Next or previous event of the view's lanes that a mask means, in the order of time; null without any. */
export function nextMatch(capture: Capture, view: View, mask: Uint8Array, time: number, event: number | null, sign: 1 | -1): number | null {
  let best: number | null = null;
  for (const lane of capture.lanes) {
    if (!isChosen(lane, view) || isDerived(lane)) continue;
    for (let i = lane.first; i < lane.limit; i++) {
      if (!mask[capture.kind[i]!] || i === event) continue;
      const order = capture.start[i]! - time || i - (event ?? -1);
      if (order * sign <= 0) continue;
      const known = best === null ? Infinity : capture.start[best]! - time || best - (event ?? -1);
      if (best === null || order * sign < known * sign) best = i;
    }
  }
  return best;
}

export function longestMatch(capture: Capture, view: View, mask: Uint8Array, range: Range | null): number | null {
  let best: number | null = null;
  for (const lane of capture.lanes) {
    if (!isChosen(lane, view) || isDerived(lane)) continue;
    for (let i = lane.first; i < lane.limit; i++) {
      if (!mask[capture.kind[i]!] || (range && (capture.end[i]! <= range[0] || capture.start[i]! >= range[1]))) continue;
      if (best === null || capture.end[i]! - capture.start[i]! > capture.end[best]! - capture.start[best]!) best = i;
    }
  }
  return best;
}

export function matchCount(capture: Capture, view: View, mask: Uint8Array): number {
  let found = 0;
  for (const lane of capture.lanes) {
    if (!isChosen(lane, view) || isDerived(lane)) continue;
    for (let i = lane.first; i < lane.limit; i++) found += mask[capture.kind[i]!]!;
  }
  return found;
}

/** The range that sums are of: the selection, or the step. */
export function rangeOf(capture: Capture, view: View): Range | null {
  const ranges = view.step ? [...stepRanges(capture, view.step, (lane) => isChosen(lane, view)).values()] : [];
  return ranges.length ? [Math.min(...ranges.map(([from]) => from)), Math.max(...ranges.map(([, to]) => to))] : view.selection;
}
