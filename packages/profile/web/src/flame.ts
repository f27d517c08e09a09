// The flame view: time by named scope, or by Python stack, outermost above.

import type { Capture, Kind } from "./data";
import { button, h } from "./dom";
import { picoseconds, share } from "./format";
import { scopePath, type Sums, valueOf } from "./query";
import type { Field, View } from "./view";

export interface FlameNode {
  readonly name: string;
  readonly field: Field; // filter that shows the node's events
  readonly value: string;
  readonly isLibrary: boolean;
  readonly children: Map<string, FlameNode>;
  self: number; // without children
  total: number;
  readonly sides?: [before: number, after: number]; // of a comparison, which gives the node its colour
}

export interface Step {
  readonly name: string;
  readonly field: Field;
  readonly value: string;
  readonly isLibrary?: boolean;
}

const ROW = 19;
const NARROWEST = 0.0012; // share of the width

export function flameTree(capture: Capture, found: Sums, by: View["flame"]): FlameNode {
  const root: FlameNode = { ...empty({ name: "all", field: "op", value: "" }) };
  capture.kinds.forEach((kind, i) => {
    if (!found.count[i] || !found.self[i]) return;
    let node = root;
    node.total += found.self[i]!;
    for (const step of kind.type === "sample" ? sampleSteps(capture, kind) : by === "scope" ? scopeSteps(kind) : stackSteps(capture, kind)) {
      const key = `${step.field}\0${step.value}\0${step.name}`;
      const child = node.children.get(key) ?? empty(step);
      node.children.set(key, child);
      node = child;
      node.total += found.self[i]!;
    }
    node.self += found.self[i]!;
  });
  return root;
}

const empty = (step: Step): FlameNode => ({ ...step, isLibrary: step.isLibrary ?? false, children: new Map(), self: 0, total: 0 });

export function scopeSteps(kind: Kind): Step[] {
  const path = scopePath(kind);
  const steps = path.map((name, i): Step => ({ name: name || "(no program)", field: "under", value: path.slice(0, i + 1).join("/") }));
  return [...steps, { name: kind.name, field: "op", value: valueOf(kind, "op") }];
}

/** The thread, and the frames of a sample without those that all samples of the thread share. */
function sampleSteps(capture: Capture, kind: Kind): Step[] {
  return [{ name: kind.module!, field: "module", value: kind.module! }, ...stackSteps(capture, kind).slice(0, -1)];
}

/** Frames of the compiled function, outermost first; frames of libraries beside each other are one step. */
export function stackSteps(capture: Capture, kind: Kind): Step[] {
  const leaf: Step = { name: kind.name, field: "op", value: valueOf(kind, "op") };
  if (kind.stack === undefined) return [{ name: "(no Python stack)", field: "module", value: kind.module ?? "" }, leaf];
  const all = capture.stacks[kind.stack]!;
  const inside = all.slice(0, Math.max(all.length - (kind.outer ?? 0), 1)).map((each) => capture.frames[each]!);
  const steps: Step[] = [];
  let libraries: string[] = [];
  const fold = () => {
    if (libraries.length) {
      const packages = [...new Set(libraries.map((file) => file.split("/")[0]!))].join(", ");
      steps.push({ name: `${libraries.length} in ${packages}`, field: "frame", value: libraries.at(-1)!, isLibrary: true });
    }
    libraries = [];
  };
  for (const frame of inside.reverse()) {
    const place = `${frame.file}:${frame.line}`;
    if (frame.isUsers) {
      fold();
      steps.push({ name: `${frame.function}  ${place}`, field: "frame", value: place });
    } else {
      libraries.push(place);
    }
  }
  fold();
  return [...steps, leaf];
}

/** Draws a tree; a click widens a node to the whole width, and a second one shows its events. */
export function flamePanel(root: FlameNode, onfilter: (field: Field, value: string) => void): HTMLElement {
  const chart = h("div", { class: "flame", role: "group", aria: { label: "Flame view: time by scope or stack" } });
  const said = h("p", { class: "help", role: "status" });
  const largest = root.sides ? largestChange(root) : 0;
  const draw = (path: readonly FlameNode[]) => {
    chart.replaceChildren();
    const focus = path.at(-1)!;
    let depth = 0;
    const put = (node: FlameNode, left: number, width: number, level: number, onclick: () => void) => {
      if (width < NARROWEST) return;
      const change = node.sides && changeOf(node, largest);
      const label = `${node.name}, ${change?.text ?? `${picoseconds(node.total)}, ${share(root.total ? node.total / root.total : 0)}`}`;
      const box = button(node.name, onclick, {
        class: node.children.size === 0 ? "leaf" : node.isLibrary ? "library" : `level${level % 4}`,
        title: label,
        aria: { label },
        data: { total: String(node.total), self: String(node.self), name: node.name, ...(node.sides ? { before: String(node.sides[0]), after: String(node.sides[1]) } : {}) },
      });
      if (change) box.style.background = change.colour;
      box.style.left = `${100 * left}%`;
      box.style.width = `${100 * width}%`;
      box.style.top = `${level * ROW}px`;
      chart.append(box);
      depth = Math.max(depth, level);
    };
    path.slice(0, -1).forEach((node, level) => put(node, 0, 1, level, () => draw(path.slice(0, level + 1))));
    const descend = (node: FlameNode, left: number, width: number, ancestors: readonly FlameNode[]) => {
      const level = ancestors.length;
      const own = [...ancestors, node];
      put(node, left, width, level, () => (node === focus && node !== root ? onfilter(node.field, node.value) : draw(own)));
      let place = left;
      for (const child of [...node.children.values()].sort((a, b) => b.total - a.total)) {
        const part = node.total ? (child.total / node.total) * width : 0;
        if (part >= NARROWEST) descend(child, place, part, own);
        place += part;
      }
    };
    descend(focus, 0, 1, path.slice(0, -1));
    chart.style.height = `${(depth + 1) * ROW}px`;
    const own = focus.self ? `, ${picoseconds(focus.self)} without its parts` : "";
    const hint = focus === root ? "Choose a part to widen it, and again to show its events." : "Choose it again to show its events.";
    said.textContent = `${focus.name}: ${focus.sides ? changeOf(focus, largest).text : `${picoseconds(focus.total)}${own}`}. ${hint}`;
  };
  draw([root]);
  return h("div", {}, said, h("div", { class: "scroll" }, chart));
}

/** The change of a part as text, and its colour: the stronger, the closer the change is to the largest. */
function changeOf(node: FlameNode, largest: number): { readonly text: string; readonly colour: string } {
  const [before, after] = node.sides!;
  const change = after - before;
  const relative = before ? ` (${change > 0 ? "+" : ""}${share(change / before)})` : "";
  const strength = largest ? Math.round(100 * Math.sqrt(Math.abs(change) / largest)) : 0;
  const hue = change > 0 ? "--grown" : "--shrunk";
  return {
    text: `${picoseconds(before)} before, ${picoseconds(after)} after${relative}`,
    colour: `color-mix(in srgb, var(${hue}) ${strength}%, var(--raised))`,
  };
}

/** The largest change of a part below the root. */
function largestChange(root: FlameNode): number {
  let most = 0;
  const visit = (node: FlameNode) => {
    for (const child of node.children.values()) {
      most = Math.max(most, Math.abs(child.sides![1] - child.sides![0]));
      visit(child);
    }
  };
  visit(root);
  return most;
}
