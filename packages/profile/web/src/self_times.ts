// Self times of the events that a range cuts, as `stack_profile.traces.intervals.self_times` defines them: an instant
// belongs in equal shares to the running events that contain no others.

import { type Capture, firstEndingAfter, type Lane } from "./data";

/** Self times in [from, to] of the lane's events that begin before it or end after it. */
export function cutSelfTimes(capture: Capture, lane: Lane, from: number, to: number): ReadonlyMap<number, number> {
  const cut: number[] = [];
  let [left, right] = [from, to]; // events cut at the beginning end by `left`, those cut at the end begin after `right`
  for (const i of overlapping(capture, lane, from, to)) {
    const [start, end] = [capture.start[i]!, capture.end[i]!];
    if (start >= from && end <= to) continue;
    cut.push(i);
    if (start < from) left = Math.max(left, Math.min(end, to));
    if (end > to) right = Math.min(right, Math.max(start, from));
  }
  const found = new Map<number, number>();
  if (!cut.length) return found;
  const parts = left > right ? [[from, to] as const] : [[from, left] as const, [right, to] as const];
  for (const [first, last] of parts) {
    if (last <= first) continue;
    const selfs = selfTimes(capture, lane, first, last);
    // A part holds the whole of the events that are cut at its edge, and none of the others.
    for (const i of cut) if (selfs.has(i)) found.set(i, selfs.get(i)!);
  }
  return found;
}

function* overlapping(capture: Capture, lane: Lane, from: number, to: number): Generator<number> {
  for (let i = firstEndingAfter(capture, lane, from); i < lane.limit && capture.start[i]! < to; i++) {
    if (capture.end[i]! > from && capture.end[i]! > capture.start[i]!) yield i;
  }
}

/** Self times of all events in [from, to], cut to it. */
function selfTimes(capture: Capture, lane: Lane, from: number, to: number): ReadonlyMap<number, number> {
  const levels = new Map<number, number[]>();
  const open: number[] = [];
  const inOrder = [...overlapping(capture, lane, from, to)].sort((a, b) => capture.start[a]! - capture.start[b]! || capture.end[b]! - capture.end[a]!);
  for (const i of inOrder) {
    let level = -1;
    if (lane.type === "thread" || lane.type === "stacks" || lane.type === "input" || capture.kinds[capture.kind[i]!]!.contains) {
      while (open.length && capture.end[open.at(-1)!]! <= capture.start[i]!) open.pop();
      level = open.length;
      open.push(i);
    }
    const events = levels.get(level);
    if (events) events.push(i);
    else levels.set(level, [i]);
  }
  const found = new Map<number, number>();
  let covered: readonly (readonly [number, number])[] = [];
  // The events that contain no others come first, then the innermost of the others.
  const innermost = [...levels.keys()].sort((a, b) => (a < 0 ? -1 : b < 0 ? 1 : b - a));
  for (const level of innermost) {
    const events = levels.get(level)!;
    const intervals = events.map((i) => [Math.max(capture.start[i]!, from), Math.min(capture.end[i]!, to)] as const);
    shares(intervals, covered).forEach((share, place) => found.set(events[place]!, share));
    covered = union([...covered, ...intervals]);
  }
  return found;
}

type Interval = readonly [number, number];

/** Share of each interval in the time outside of `excluded`, which overlapping intervals divide equally. */
function shares(intervals: readonly Interval[], excluded: readonly Interval[]): number[] {
  const times = Float64Array.from([...intervals, ...excluded].flat()).sort();
  const change = new Map<number, [number, number]>(); // running and excluded intervals that begin minus those that end
  const add = (time: number, running: number, blocked: number) => {
    const known = change.get(time) ?? [0, 0];
    change.set(time, [known[0] + running, known[1] + blocked]);
  };
  for (const [start, end] of intervals) add(start, 1, 0), add(end, -1, 0);
  for (const [start, end] of excluded) add(start, 0, 1), add(end, 0, -1);
  const sums = new Map<number, number>();
  let [sum, running, blocked, last] = [0, 0, 0, times[0] ?? 0];
  for (const time of times) {
    if (!blocked && running) sum += (time - last) / running;
    last = time;
    if (sums.has(time)) continue;
    sums.set(time, sum);
    running += change.get(time)![0];
    blocked += change.get(time)![1];
  }
  return intervals.map(([start, end]) => sums.get(end)! - sums.get(start)!);
}

function union(intervals: readonly Interval[]): Interval[] {
  const found: [number, number][] = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}
