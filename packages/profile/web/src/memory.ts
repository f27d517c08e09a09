// Memory: the arrays at the peak of a program, its temporaries over the schedule, and the history of allocators.

import type { Allocator, Capture, ProgramMemory } from "./data";
import { button, h, select } from "./dom";
import { bytes, count, picoseconds, share } from "./format";
import { type Column, grid } from "./grid";
import type { PanelActions, Shown } from "./panel";
import { type Sums, isGroup } from "./query";
import { BOTTOM, drawAxes, extent, frame, LEFT, linearAxis, RIGHT, s, stepPath, TOP } from "./svg";
import { ARRAYS, type View } from "./view";

interface Group {
  readonly name: string;
  readonly kind: string;
  readonly size: number;
  readonly buffers: number;
  readonly layer: string;
  readonly line: string;
}

export function memoryPanel(capture: Capture, { view, found, range }: Shown, actions: PanelActions): HTMLElement {
  const allocators = capture.allocators.filter((each) => isGroup(each.device, view));
  const histories = allocators.map((each) => allocatorChart(each, range ?? [capture.from, capture.to]));
  const program = chosenProgram(capture, view, found);
  if (!program) {
    const reason = capture.failures["memory"] ? `The memory of programs could not be read. ${capture.failures["memory"]}` : "The trace holds no buffers of a program that ran.";
    return h("div", {}, others(actions), h("p", { class: "empty" }, reason), ...histories);
  }
  const options = capture.memory.map(({ program: name, facts }) => [name, `${name} (${bytes(facts["total_bytes"] as number)})`] as const);
  const facts = Object.entries(program.facts).filter(([name, value]) => name.endsWith("_bytes") && value !== null);
  const list = h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", { data: { fact: name, value: String(value) } }, h("dt", {}, name.replace(/_bytes$/, "").replaceAll("_", " ")), h("dd", {}, bytes(value as number)))));
  const controls = h(
    "div",
    { class: "controls" },
    select("program", options, program.program, (value) => actions.change({ program: value })),
    select("arrays by", ARRAYS.map((each) => [each, each]), view.arrays, (value) => actions.change({ arrays: value as View["arrays"] })),
    h("span", { class: "help" }, "on one device, while the program runs"),
  );
  return h(
    "div",
    {},
    others(actions),
    controls,
    list,
    program.moments.length ? scheduleChart(program, actions) : h("p", { class: "empty" }, "XLA kept no schedule of this program's temporaries."),
    table(program, view, actions),
    ...histories,
    capture.allocators.length ? null : h("p", { class: "empty" }, "The trace has no events of an allocator: the process's memory over time is not known. GPUs record it."),
    h("ul", { class: "notes" }, ...program.notes.map((note) => h("li", {}, note))),
  );
}

/** Links to the analyses of other memory, if the capture has it: live arrays of a full device, and the Python heap. */
function others(actions: PanelActions): HTMLElement | null {
  const known = [["out_of_memory", "Live arrays when a device was out of memory"], ["python_heap", "Python heap at its peak"]] as const;
  const found = known.filter(([section]) => document.querySelector(`main #${section} tbody tr`));
  if (!found.length) return null;
  return h("p", { class: "controls" }, ...found.map(([section, text]) => button(text, () => actions.change({ tab: "more", section, sort: "", rows: "" }), { class: "link" })));
}

/** The program that the view names, or the one with the most time in the selection. */
function chosenProgram(capture: Capture, view: View, found: Sums): ProgramMemory | null {
  const times = new Map<string, number>();
  capture.kinds.forEach((kind, i) => kind.module && times.set(kind.module, (times.get(kind.module) ?? 0) + found.self[i]!));
  const named = capture.memory.find(({ program }) => program === view.program);
  return named ?? [...capture.memory].sort((a, b) => (times.get(b.program) ?? 0) - (times.get(a.program) ?? 0))[0] ?? null;
}

function grouped(program: ProgramMemory, by: View["arrays"]): Group[] {
  const rows = program.rows.map(([name, kind, size, layer, line]) => ({ name, kind, size, layer, line, buffers: 1 }));
  if (by === "buffer") return rows;
  const groups = new Map<string, Group[]>();
  for (const row of rows) groups.set(row[by], [...(groups.get(row[by]) ?? []), row]);
  const only = (values: readonly string[]) => (new Set(values).size === 1 ? values[0]! : "");
  return [...groups].map(([name, members]) => ({
    name,
    kind: [...new Set(members.map((row) => row.kind))].sort().join(", "),
    size: members.reduce((sum, row) => sum + row.size, 0),
    buffers: members.length,
    layer: only(members.map((row) => row.layer)),
    line: only(members.map((row) => row.line)),
  }));
}

function table(program: ProgramMemory, view: View, actions: PanelActions): HTMLElement {
  const total = program.facts["total_bytes"] as number;
  const isBuffer = view.arrays === "buffer";
  const name = (row: Group) => row.name || "(none)";
  const columns: Column<Group>[] = [
    { key: "name", title: isBuffer ? "array" : view.arrays, kind: "text", value: name, show: (row) => (isBuffer ? actions.operation(program.program, row.name) : name(row)) },
    { key: "kind", title: "kind", kind: "text", value: (row) => row.kind },
    { key: "size", title: "size", kind: "number", value: (row) => row.size, show: (row) => bytes(row.size) },
    { key: "share", title: "% of total", kind: "number", value: (row) => (total ? row.size / total : null), show: (row) => share(row.size / total) },
    { key: "buffers", title: "buffers", kind: "number", value: (row) => row.buffers, show: (row) => count(row.buffers) },
    ...(view.arrays === "layer" ? [] : ([{ key: "layer", title: "layer", kind: "text", value: (row: Group) => row.layer }] as const)),
    ...(view.arrays === "line" ? [] : ([{ key: "line", title: "line", kind: "text", value: (row: Group) => row.line, show: (row: Group) => actions.place(row.line) }] as const)),
  ];
  return grid(`arrays at the peak of ${program.program}`, grouped(program, view.arrays), columns, view, actions, "-size");
}

function scheduleChart(program: ProgramMemory, actions: PanelActions): HTMLElement {
  const { moments, peak_at: peak } = program;
  const figure = frame(`Live temporaries over the schedule of ${program.program}`, 220);
  const { svg, width, height, tip } = figure;
  const x = linearAxis(0, Math.max(moments.at(-1)![0], 1), LEFT, width - RIGHT, "whole");
  const y = linearAxis(0, Math.max(...moments.map((moment) => moment[2]), 1) * 1.08, height - BOTTOM, TOP + 8, "bytes");
  drawAxes(figure, x, y, { x: count, y: bytes }, { x: "position in the schedule", y: "live" });
  const places = moments.map(([position, , live]) => [x.at(position), y.at(live)] as const);
  svg.append(s("path", { class: "area", d: stepPath([...places, [width - RIGHT, places.at(-1)![1]]], y.at(0)) }));
  const cursor = s("line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const [, at, live] = moments[peak]!;
  const [px, py] = places[peak]!;
  const anchor = px > width / 2 ? "end" : "start";
  svg.append(cursor, s("circle", { class: "dot memory", cx: px, cy: py, r: 4 }));
  svg.append(s("text", { class: "label", x: px + (anchor === "end" ? -8 : 8), y: Math.max(py - 6, 12), "text-anchor": anchor }, `peak ${bytes(live)} at ${at}`));
  const nearest = (event: PointerEvent) => {
    const position = x.from(event.offsetX);
    let [low, high] = [0, moments.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (moments[middle]![0] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  svg.addEventListener("pointermove", (event) => {
    const place = nearest(event);
    const [position, instruction, size, line] = moments[place]!;
    cursor.setAttribute("visibility", "visible");
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, String(x.at(position)));
    tip([bytes(size), `${instruction}, position ${count(position)}`, ...(line ? [line] : [])], event.offsetX, event.offsetY);
  });
  svg.addEventListener("pointerleave", () => (tip(null), cursor.setAttribute("visibility", "hidden")));
  svg.addEventListener("click", (event) => actions.filter("op", `${program.program}: ${moments[nearest(event)]![1]}`));
  figure.element.append(h("p", { class: "help" }, "A click shows the events of the instruction. The peak is at ", button(at, () => actions.filter("op", `${program.program}: ${at}`), { class: "link" }), "."));
  return figure.element;
}

function allocatorChart(allocator: Allocator, [from, to]: readonly [number, number]): HTMLElement {
  const { time, allocated, available, peak } = allocator;
  const figure = frame(`Memory in use of ${allocator.device}, by its allocator ${allocator.name}`, 200);
  const { svg, width, height, tip } = figure;
  const x = linearAxis(from, to, LEFT, width - RIGHT);
  // The state at the start of the range is that of the last event before it.
  let first = 0;
  while (first + 1 < time.length && time[first + 1]! <= from) first++;
  let limit = first;
  while (limit < time.length && time[limit]! <= to) limit++;
  const inside = Array.from({ length: Math.max(limit - first, 1) }, (_, i) => first + i);
  const [least, highestUsed] = extent(inside.map((i) => allocated[i]!));
  const most = Math.max(highestUsed, 1);
  // Changes that are small beside the whole are visible only on an axis that does not begin at 0.
  const low = most - least < 0.2 * most ? Math.max(0, least - (most - least || 0.05 * most)) : 0;
  const y = linearAxis(low, most + 0.08 * (most - low), height - BOTTOM, TOP + 8, "bytes");
  drawAxes(figure, x, y, { x: (value) => picoseconds(value), y: bytes }, { x: "time", y: low ? "in use (not from 0)" : "in use" });
  const places = inside.map((i) => [x.at(Math.max(time[i]!, from)), y.at(allocated[i]!)] as const);
  svg.append(s("path", { class: "area", d: stepPath([...places, [width - RIGHT, places.at(-1)![1]]], height - BOTTOM) }));
  svg.addEventListener("pointermove", (event) => {
    const at = x.from(event.offsetX);
    let place = first;
    while (place + 1 < limit && time[place + 1]! <= at) place++;
    tip([`${bytes(allocated[place]!)} in use`, `${bytes(available[place]!)} free, at most ${bytes(peak[place]!)} so far`, `at ${picoseconds(time[place]!)}`], event.offsetX, event.offsetY);
  });
  svg.addEventListener("pointerleave", () => tip(null));
  const [, highest] = extent(inside.map((i) => peak[i]!));
  figure.element.append(h("p", { class: "help" }, `${count(inside.length)} ${inside.length === 1 ? "state" : "states"} in this range: ${bytes(least)} to ${bytes(most)} in use; at most ${bytes(highest)} since the process started.`));
  return figure.element;
}
