// The two captures of a comparison on one timeline: the same step of both starts at one place.

import type { Capture, Kind, Lane } from "./data";
import type { Range, View } from "./view";

/** Name of the step before with which a step is compared; the own name of a capture's only side. */
export const stepName = (kind: Kind): string => kind.pair ?? kind.name;

/** Time from the start of a step to its end on each side; the steps' devices are those of the view. */
export function stepRanges(capture: Capture, step: string, isChosen: (lane: Lane) => boolean): ReadonlyMap<number, Range> {
  const found = new Map<number, Range>();
  for (const lane of capture.lanes) {
    if (lane.type !== "steps" || found.has(lane.side) || !isChosen(lane)) continue;
    for (let i = lane.first; i < lane.limit; i++) {
      if (stepName(capture.kinds[capture.kind[i]!]!) === `step ${step}`) found.set(lane.side, [capture.start[i]!, capture.end[i]!]);
    }
  }
  return found;
}

/** Moves the events after, so that the view's step starts with the step before. Returns whether it moved any. */
export function align(capture: Capture, view: View): boolean {
  if (!capture.changes || !view.step) return false;
  const ranges = stepRanges(capture, view.step, () => true);
  const [before, after] = [ranges.get(0), ranges.get(1)];
  if (!before || !after || before[0] === after[0]) return false;
  const shift = before[0] - after[0];
  for (const lane of capture.lanes) {
    if (lane.side !== 1) continue;
    for (let i = lane.first; i < lane.limit; i++) {
      capture.start[i]! += shift;
      capture.end[i]! += shift;
      capture.reached[i]! += shift;
    }
  }
  const filled = capture.lanes.filter((lane) => lane.limit > lane.first);
  capture.from = Math.min(...filled.map((lane) => capture.start[lane.first]!));
  capture.to = Math.max(...filled.map((lane) => capture.reached[lane.limit - 1]!));
  return true;
}
