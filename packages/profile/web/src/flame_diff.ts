// The differential flame view of a comparison: time by named scope or Python stack, coloured by its change.

import type { Capture, Kind } from "./data";
import { h, select } from "./dom";
import { flamePanel, type FlameNode, scopeSteps, stackSteps, type Step } from "./flame";
import { picoseconds } from "./format";
import type { PanelActions, Shown } from "./panel";
import { sums, type Sums } from "./query";
import { stepRanges } from "./sides";
import type { Range, View } from "./view";

const SIDES = ["before", "after"] as const;

/** Sums of one side per step: of the view's step, of the selected time, or of all steps of the timeline. */
function sideSums(capture: Capture, { view, mask }: Shown, side: 0 | 1): { readonly found: Sums; readonly steps: number } {
  const everything: View = { ...view, device: "", of: "operations" };
  const of = (range: Range | null, steps: number) => ({ found: sums(capture, everything, range, mask, side), steps });
  if (view.step) return of(stepRanges(capture, view.step, () => true).get(side) ?? [0, 0], 1);
  if (view.selection) return of(view.selection, 1);
  const lane = capture.lanes.find((each) => each.type === "steps" && each.side === side);
  if (!lane) return of(null, 1);
  return of([capture.start[lane.first]!, capture.end[lane.limit - 1]!], lane.limit - lane.first);
}

/** Steps of a path without what an edit or a compilation renames: numbers of lines, and names of operations. */
function pathOf(capture: Capture, kind: Kind, by: View["flame"]): Step[] {
  const steps = by === "scope" ? scopeSteps(kind) : stackSteps(capture, kind);
  const named = steps.slice(0, -1).map((step) => ({ ...step, name: step.name.replace(/  (before|after): /, "  ").replace(/:\d+$/, "") }));
  return [...named, { name: kind.category ?? "other", field: "category", value: kind.category ?? "" }];
}

export function diffTree(capture: Capture, shown: Shown, by: View["flame"], wide: View["wide"]): FlameNode {
  const make = (step: Step): FlameNode => ({ ...step, isLibrary: step.isLibrary ?? false, children: new Map(), self: 0, total: 0, sides: [0, 0] });
  const root = make({ name: "step", field: "op", value: "" });
  for (const side of [0, 1] as const) {
    const { found, steps } = sideSums(capture, shown, side);
    capture.kinds.forEach((kind, i) => {
      const time = found.self[i]! / steps;
      if (!time) return;
      let node = root;
      const width = SIDES[side] === wide ? time : 0;
      const add = () => {
        node.sides![side] += time;
        node.total += width;
      };
      add();
      for (const step of pathOf(capture, kind, by)) {
        const child = node.children.get(step.name) ?? make(step);
        node.children.set(step.name, child);
        node = child;
        add();
      }
      node.self += width;
    });
  }
  return root;
}

export function flameDiffPanel(capture: Capture, shown: Shown, actions: PanelActions): HTMLElement {
  const { view } = shown;
  const root = diffTree(capture, shown, view.flame, view.wide);
  const [before, after] = root.sides!;
  const what = view.step ? `step ${view.step}` : view.selection ? "the selected time" : "the mean step";
  const controls = h(
    "div",
    { class: "controls" },
    select("by", [["scope", "named scope"], ["stack", "Python stack"]], view.flame, (value) => actions.change({ flame: value as View["flame"] })),
    select("width", SIDES.map((side) => [side, side]), view.wide, (value) => actions.change({ wide: value as View["wide"] })),
    h("span", { class: "help" }, `Devices in ${what}: ${picoseconds(before)} before, ${picoseconds(after)} after. Red grew, blue shrank.`),
  );
  if (!before && !after) return h("div", {}, controls, h("p", { class: "empty" }, "No event of the selection matches."));
  return h("div", {}, controls, flamePanel(root, (field, value) => actions.filter(field, value)), goneList(root, view.wide));
}

/** Names the parts without width, which the chart cannot show. */
function goneList(root: FlameNode, wide: View["wide"]): HTMLElement | null {
  const gone: [string, number][] = [];
  const visit = (node: FlameNode, path: readonly string[]) => {
    const other = node.sides![wide === "after" ? 0 : 1];
    if (node.total || !other) for (const child of node.children.values()) visit(child, [...path, child.name]);
    else gone.push([path.join(" / "), other]);
  };
  visit(root, []);
  if (!gone.length) return null;
  const items = gone.sort((a, b) => b[1] - a[1]).slice(0, 20).map(([name, time]) => h("li", { data: { total: String(time) } }, `${name}: ${picoseconds(time)}`));
  return h("div", {}, h("p", { class: "help" }, wide === "after" ? "Only before:" : "Only after:"), h("ul", { class: "notes gone" }, ...items));
}
