// The neighbourhood of an instruction in its program: inputs above it, users below it, and the inside of a fusion.

import type { Capture, Program } from "./data";
import { button, h, select } from "./dom";
import { bytes, count, flops, seconds } from "./format";
import { type Column, grid, number, text } from "./grid";
import type { PanelActions, Shown } from "./panel";
import { type Sums, sums, valueOf } from "./query";
import { s } from "./svg";
import { DEPTHS, type View } from "./view";

interface Neighbour {
  readonly node: number;
  readonly distance: number; // negative for inputs
  readonly relation: "itself" | "reads" | "read by" | "fuses";
}

interface Index {
  readonly program: Program;
  readonly places: ReadonlyMap<string, number>;
  readonly inside: ReadonlyMap<number, readonly number[]>; // instructions of each fusion
}

const [NAME, OPCODE, SHAPE, SIZE, FLOPS, TRAFFIC, LINE, FUSION, OPERANDS, USERS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] as const;
const BOX = { width: 172, height: 46, gap: 14, between: 46 };
const MOST_IN_LAYER = 7;
const MOST_INSIDE = 60;

const indices = new WeakMap<Program, Index>();

function indexOf(program: Program): Index {
  const known = indices.get(program);
  if (known) return known;
  const inside = new Map<number, number[]>();
  program.nodes.forEach((node, i) => {
    if (node[FUSION] >= 0) inside.set(node[FUSION], [...(inside.get(node[FUSION]) ?? []), i]);
  });
  const index = { program, places: new Map(program.nodes.map((node, i) => [node[NAME], i])), inside };
  indices.set(program, index);
  return index;
}

/** The instruction that the view names, that its filter or event names, or the one with the most time. */
function chosen(capture: Capture, view: View, found: Sums): { index: Index; node: number } | null {
  const named = (value: string) => {
    const [program = "", name = ""] = split(value);
    const graph = capture.graphs.find((each) => each.program === program);
    const node = graph && indexOf(graph).places.get(name);
    return graph && node !== undefined ? { index: indexOf(graph), node } : null;
  };
  const event = view.event === null ? "" : valueOf(capture.kinds[capture.kind[view.event]!]!, "op");
  for (const value of [view.node, view.where.op ?? "", event]) {
    const match = named(value);
    if (match) return match;
  }
  const ordered = [...capture.kinds.keys()].sort((a, b) => found.self[b]! - found.self[a]!);
  for (const containers of [false, true]) {
    for (const i of ordered) {
      const kind = capture.kinds[i]!;
      if (kind.type !== "operation" || Boolean(kind.contains) !== containers) continue;
      const match = named(valueOf(kind, "op"));
      if (match) return match;
    }
  }
  return null;
}

const split = (value: string): readonly string[] => /^(.*?): (.*)$/s.exec(value)?.slice(1) ?? [];

function neighbours(index: Index, centre: number, depth: number): Neighbour[] {
  const seen = new Set([centre]);
  const found: Neighbour[] = [{ node: centre, distance: 0, relation: "itself" }];
  for (const sign of [-1, 1]) {
    let wave = [centre];
    for (let distance = 1; distance <= depth; distance++) {
      const next: number[] = [];
      for (const node of wave) {
        for (const other of sign < 0 ? index.program.nodes[node]![OPERANDS] : index.program.nodes[node]![USERS]) {
          if (seen.has(other)) continue;
          seen.add(other);
          next.push(other);
          found.push({ node: other, distance: sign * distance, relation: sign < 0 ? "reads" : "read by" });
        }
      }
      wave = next;
    }
  }
  return found;
}

export function graphPanel(capture: Capture, { view, range }: Shown, actions: PanelActions): HTMLElement {
  const found = sums(capture, { ...view, of: "operations" }, range, null);
  const match = chosen(capture, view, found);
  if (!match) {
    const reason = capture.failures["graphs"] ?? "The trace holds no program of its operations that this version of XLA can read.";
    return h("p", { class: "empty" }, `No graph. ${reason}`);
  }
  const { index, node: centre } = match;
  const { program } = index.program;
  const times = new Map<string, { self: number; count: number }>();
  capture.kinds.forEach((kind, i) => {
    if (kind.type !== "operation" || kind.module !== program || !found.count[i]) return;
    const known = times.get(kind.name) ?? { self: 0, count: 0 };
    times.set(kind.name, { self: known.self + found.self[i]!, count: known.count + found.count[i]! });
  });
  const time = (node: number) => times.get(index.program.nodes[node]![NAME].replace(/^%/, ""));
  const go = (node: number) => actions.change({ node: `${program}: ${index.program.nodes[node]![NAME]}` });
  const near = neighbours(index, centre, Number(view.depth));
  const inside = index.inside.get(centre) ?? [];
  const name = index.program.nodes[centre]![NAME];
  const controls = h(
    "div",
    { class: "controls" },
    select("neighbours up to", DEPTHS.map((each) => [each, `${each} away`]), view.depth, (depth) => actions.change({ depth: depth as View["depth"] })),
    view.node ? button("Follow the chosen event", () => actions.change({ node: "" })) : null,
    h("span", { class: "help" }, `${program}: `),
    actions.operation(program, name),
  );
  const rows = [...near, ...near.flatMap(({ node, distance }) => (index.inside.get(node) ?? []).map((part): Neighbour => ({ node: part, distance, relation: "fuses" })))];
  return h(
    "div",
    {},
    controls,
    drawing(`Inputs and users of ${name}`, index, near.map(({ node, distance }) => [node, distance] as const), centre, time, go),
    inside.length ? drawing(`Inside of ${name}`, index, insideLayers(index, inside), centre, time, null) : null,
    table(index, rows, time, go, view, actions),
  );
}

/** Instructions of a fusion, and the arrays that it reads, each below the instructions that it needs. */
function insideLayers(index: Index, inside: readonly number[]): (readonly [number, number])[] {
  const { nodes } = index.program;
  const shown = inside.slice(0, MOST_INSIDE);
  const layers = new Map<number, number>();
  for (const node of shown) for (const operand of nodes[node]![OPERANDS]) if (!shown.includes(operand)) layers.set(operand, 0);
  // In the program's order, in which operands come first.
  for (const node of shown) layers.set(node, 1 + Math.max(0, ...nodes[node]![OPERANDS].map((operand) => layers.get(operand) ?? 0)));
  return [...layers];
}

type Time = (node: number) => { self: number; count: number } | undefined;

function drawing(label: string, index: Index, layers: readonly (readonly [number, number])[], centre: number, time: Time, go: ((node: number) => void) | null): HTMLElement {
  const { nodes } = index.program;
  const levels = [...new Set(layers.map(([, level]) => level))].sort((a, b) => a - b);
  const panel = Math.max(320, Math.min(document.documentElement.clientWidth - 60, 1800));
  const fitting = Math.max(2, Math.min(MOST_IN_LAYER, Math.floor((panel + BOX.gap) / (BOX.width + BOX.gap))));
  const places = new Map<number, readonly [number, number]>();
  const more: { level: number; left: number; y: number; names: string[] }[] = [];
  const rows = levels.map((level) => {
    const all = layers.filter(([, each]) => each === level).map(([node]) => node);
    // The largest arrays first; the others are in the table.
    const ordered = [...all].sort((a, b) => nodes[b]![SIZE] - nodes[a]![SIZE]);
    const kept = all.length > fitting ? ordered.slice(0, fitting - 1) : all;
    return { level, kept, left: all.filter((node) => !kept.includes(node)) };
  });
  const columns = Math.max(...rows.map(({ kept, left }) => kept.length + (left.length ? 1 : 0)));
  const width = Math.max(columns * (BOX.width + BOX.gap) + BOX.gap, BOX.width * 2);
  rows.forEach(({ level, kept, left }, row) => {
    // Below the middle of what it is joined with, so that edges cross less.
    const middle = (node: number) => {
      const joined = [...nodes[node]![OPERANDS], ...index.program.nodes[node]![USERS]].flatMap((other) => (places.has(other) ? [places.get(other)![0]] : []));
      return joined.length ? joined.reduce((a, b) => a + b, 0) / joined.length : width / 2;
    };
    const ordered = row ? [...kept].sort((a, b) => middle(a) - middle(b)) : kept;
    const size = ordered.length + (left.length ? 1 : 0);
    const start = (width - size * (BOX.width + BOX.gap) + BOX.gap) / 2;
    const y = 4 + row * (BOX.height + BOX.between);
    ordered.forEach((node, i) => places.set(node, [start + i * (BOX.width + BOX.gap), y]));
    if (left.length) more.push({ level, left: start + ordered.length * (BOX.width + BOX.gap), y, names: left.map((node) => nodes[node]![NAME]) });
  });
  const height = levels.length * (BOX.height + BOX.between) - BOX.between + 10;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label, class: "graph" });
  const edges: SVGElement[] = [];
  const boxes: SVGElement[] = [];
  const most = Math.max(...layers.map(([node]) => time(node)?.self ?? 0), 1);
  for (const [node, [x, y]] of places) {
    for (const operand of nodes[node]![OPERANDS]) {
      const from = places.get(operand);
      if (!from || from[1] >= y) continue;
      const [x1, y1, x2, y2] = [from[0] + BOX.width / 2, from[1] + BOX.height, x + BOX.width / 2, y];
      edges.push(s("path", { class: "edge", d: `M${x1} ${y1}C${x1} ${y1 + 24} ${x2} ${y2 - 24} ${x2} ${y2}` }, s("title", {}, `${nodes[operand]![NAME]} → ${nodes[node]![NAME]}: ${nodes[operand]![SHAPE]}, ${bytes(nodes[operand]![SIZE])}`)));
    }
    boxes.push(box(index, node, [x, y], node === centre && go !== null, time(node), most, go));
  }
  for (const { left, y, names } of more) {
    boxes.push(s("g", { class: "more" }, s("title", {}, names.slice(0, 40).join(", ")), s("rect", { x: left, y, width: BOX.width, height: BOX.height, rx: 4 }), s("text", { x: left + BOX.width / 2, y: y + BOX.height / 2 + 4, "text-anchor": "middle" }, `${count(names.length)} more, in the table`)));
  }
  svg.append(...edges, ...boxes);
  return h("figure", { class: "drawing" }, h("figcaption", {}, label), h("div", { class: "wide" }, svg as unknown as Node));
}

function box(index: Index, node: number, [x, y]: readonly [number, number], isCentre: boolean, time: { self: number; count: number } | undefined, most: number, go: ((node: number) => void) | null): SVGElement {
  const [name, opcode, shape, size] = index.program.nodes[node]!;
  const took = time ? `${seconds(time.self * 1e-12)}` : "";
  const cut = (text: string, letters: number) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);
  const said = [name, opcode, `${shape}, ${bytes(size)}`, took, index.program.nodes[node]![LINE]].filter(Boolean).join(", ");
  const rect = s("rect", { x, y, width: BOX.width, height: BOX.height, rx: 4 });
  const heat = s("rect", { class: "heat", x, y: y + BOX.height - 4, width: BOX.width * ((time?.self ?? 0) / most), height: 4 });
  const group = s(
    "g",
    { class: isCentre ? "node centre" : "node", role: go ? "button" : "img", "aria-label": said, ...(go ? { tabindex: 0 } : {}) },
    s("title", {}, said),
    rect,
    heat,
    s("text", { class: "name", x: x + 6, y: y + 15 }, cut(name, 27)),
    s("text", { x: x + 6, y: y + 28 }, cut(`${opcode}${took ? `, ${took}` : ""}`, 28)),
    s("text", { x: x + 6, y: y + 39 }, cut(shape.replace(/\{.*$/, ""), 28)),
  );
  if (go) {
    group.addEventListener("click", () => go(node));
    group.addEventListener("keydown", (event) => (event as KeyboardEvent).key === "Enter" && go(node));
  }
  return group;
}

function table(index: Index, rows: readonly Neighbour[], time: Time, go: (node: number) => void, view: View, actions: PanelActions): HTMLElement {
  const { nodes } = index.program;
  const columns: Column<Neighbour>[] = [
    number("distance", "distance", (row) => row.distance, String),
    text("relation", "relation", ({ relation, node }) => (relation === "fuses" ? `in ${nodes[nodes[node]![FUSION]]![NAME]}` : relation)),
    text("name", "name", ({ node }) => nodes[node]![NAME], ({ node, relation }) => (relation === "fuses" ? nodes[node]![NAME] : button(nodes[node]![NAME], () => go(node), { class: "link", title: "Show its neighbours" }))),
    text("opcode", "opcode", ({ node }) => nodes[node]![OPCODE]),
    text("shape", "shape", ({ node }) => nodes[node]![SHAPE]),
    number("result", "result", ({ node }) => nodes[node]![SIZE], bytes),
    number("flops", "FLOPs", ({ node }) => nodes[node]![FLOPS], flops),
    number("traffic", "bytes", ({ node }) => nodes[node]![TRAFFIC], bytes),
    number("self", "self", ({ node, relation }) => (relation === "fuses" ? null : ((time(node)?.self ?? null) === null ? null : time(node)!.self * 1e-12)), seconds),
    number("occurrences", "occurrences", ({ node, relation }) => (relation === "fuses" ? null : (time(node)?.count ?? null)), count),
    text("line", "line", ({ node }) => nodes[node]![LINE], ({ node }) => actions.place(nodes[node]![LINE])),
  ];
  return grid("instructions", rows, columns, view, actions, "distance");
}
