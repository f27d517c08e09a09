// The panel below the timeline: totals of the selection, the chosen event, the source, the flame view.

import { advicePanel } from "./advice";
import { changesPanel } from "./changes";
import { communicationPanel, compilePanel, inputPanel } from "./communication";
import { type Capture, type Frame, type Kind, laneOf, targetsOf } from "./data";
import { button, h, select } from "./dom";
import { bytes, count, flops, picoseconds, share } from "./format";
import { flamePanel, flameTree } from "./flame";
import { flameDiffPanel } from "./flame_diff";
import { sourcePanel } from "./source";
import { type Column, grid } from "./grid";
import { graphPanel } from "./graph";
import { memoryPanel } from "./memory";
import { morePanel } from "./more";
import { type Sums, type Total, totals, valueOf } from "./query";
import { rooflinePanel } from "./roofline";
import { rowKey, type TableRow, visit } from "./tables";
import { type Field, GROUPINGS, LANES, type Range, type Tab, TABS, type View } from "./view";

export interface PanelActions {
  change(view: Partial<View>): void;
  filter(field: Field, value: string): void;
  fit(range: Range): void;
  event(event: number): void; // chooses and reveals it, without leaving the tab
  line(kind: Kind): HTMLElement | string; // as a link to its source
  place(line: string, text?: string): HTMLElement | string; // "file:line" as a link to its source
  operation(program: string, name: string): HTMLElement | string; // as a link to its events
}

export interface Shown {
  readonly view: View;
  readonly range: Range | null;
  readonly found: Sums; // of the events that the view means, in its range
  readonly busy: number; // of all events in the range, in picoseconds
  readonly mask: Uint8Array; // kinds that the view means
}

const COMPARED: ReadonlySet<Tab> = new Set(["changes", "event", "source", "flame"]); // tabs of a comparison
const TIMES: Readonly<Record<View["of"], string>> = { operations: "devices", thread: "host threads", stacks: "Python stacks" };
const SAMPLED: ReadonlySet<View["by"]> = new Set(["op", "line", "file", "module"]); // groupings of Python stacks
const titleOf = (view: View, by: View["by"]): string => (by === "op" ? "name" : by === "module" && view.of === "stacks" ? "thread" : by);
const NAMES: Readonly<Record<Tab, string>> = { changes: "Changes", ops: "Ops", advice: "Advice", event: "Event", source: "Source", flame: "Flame", roofline: "Roofline", memory: "Memory", graph: "Graph", communication: "Communication", input: "Input", compile: "Compile", more: "More" };

export class Panel {
  readonly element: HTMLElement;
  private readonly body = h("div", { class: "body", role: "tabpanel" });
  private readonly actions: PanelActions;
  private readonly operations: ReadonlySet<string>;
  private readonly hasKernels: boolean; // as on GPUs
  private readonly known: readonly Tab[];
  private readonly tabs: ReadonlyMap<Tab, HTMLButtonElement>;

  constructor(
    private readonly capture: Capture,
    private readonly rows: ReadonlyMap<string, readonly TableRow[]>,
    actions: Pick<PanelActions, "change" | "filter" | "fit" | "event">,
  ) {
    this.actions = {
      ...actions,
      line: (kind) => this.line(kind),
      place: (place, text) => this.place(place, text),
      operation: (program, name) => this.operation(program, name),
    };
    this.hasKernels = capture.kinds.some((kind) => kind.kernel);
    this.operations = new Set(capture.kinds.filter((kind) => kind.type === "operation").map((kind) => valueOf(kind, "op")));
    this.known = TABS.filter((tab) => (capture.changes ? COMPARED.has(tab) : tab !== "changes"));
    this.tabs = new Map(this.known.map((tab) => [tab, button(NAMES[tab], () => actions.change({ tab, sort: "", rows: "" }), { role: "tab" })]));
    const list = h("div", { class: "tabs", role: "tablist", aria: { label: "Details" } }, ...this.tabs.values());
    list.addEventListener("keydown", (event) => this.turn(event));
    this.element = h("div", { class: "panel" }, list, this.body);
  }

  show(shown: Shown): void {
    const tab = this.known.includes(shown.view.tab) ? shown.view.tab : this.known[0]!;
    for (const [name, element] of this.tabs) {
      element.setAttribute("aria-selected", String(name === tab));
      element.tabIndex = name === tab ? 0 : -1;
    }
    this.body.setAttribute("aria-label", NAMES[tab]);
    const contents: Readonly<Record<Tab, () => HTMLElement>> = {
      changes: () => changesPanel(this.capture, shown, this.actions),
      ops: () => this.ops(shown),
      advice: () => advicePanel(this.capture, this.actions),
      event: () => this.event(shown),
      source: () => this.source(shown),
      flame: () => (this.capture.changes ? flameDiffPanel(this.capture, shown, this.actions) : this.flame(shown)),
      roofline: () => rooflinePanel(this.capture, shown, this.actions),
      memory: () => memoryPanel(this.capture, shown, this.actions),
      graph: () => graphPanel(this.capture, shown, this.actions),
      communication: () => communicationPanel(this.capture, shown, this.actions),
      input: () => inputPanel(this.capture, shown, this.actions),
      compile: () => compilePanel(this.capture, shown, this.actions),
      more: () => morePanel(shown.view, this.actions),
    };
    this.keepingFocus(() => this.body.replaceChildren(contents[tab]()));
  }

  /** Rebuilds the contents; the control that has the keyboard keeps it. */
  private keepingFocus(rebuild: () => void): void {
    const active = this.body.contains(document.activeElement) ? (document.activeElement as HTMLElement) : null;
    const name = active?.dataset["focus"];
    const caret = active instanceof HTMLInputElement ? active.selectionStart : null;
    rebuild();
    const next = name && [...this.body.querySelectorAll<HTMLElement>("[data-focus]")].find((each) => each.dataset["focus"] === name);
    if (!next) return;
    next.focus({ preventScroll: true });
    if (next instanceof HTMLInputElement && caret !== null) next.setSelectionRange(caret, caret);
  }

  private turn(event: KeyboardEvent): void {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const place = this.known.findIndex((tab) => this.tabs.get(tab) === document.activeElement);
    if (!step || place < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const tab = this.known[(place + step + this.known.length) % this.known.length]!;
    this.actions.change({ tab, sort: "", rows: "" });
    this.tabs.get(tab)!.focus();
  }

  /** Sums of the selection by name, line, file, layer, scope, category, pass or module. */
  private ops({ view, range, found, busy }: Shown): HTMLElement {
    const { actions, capture } = this;
    const isHost = view.of !== "operations";
    const by = view.of === "thread" || (view.of === "stacks" && !SAMPLED.has(view.by)) ? "op" : view.by;
    const groups = totals(capture, found, by);
    const controls = h(
      "div",
      { class: "controls" },
      this.timesOf(view),
      view.of === "thread" ? null : select("by", GROUPINGS.filter((each) => (isHost ? SAMPLED.has(each) : each !== "kernel" || this.hasKernels)).map((each) => [each, titleOf(view, each)]), by, (value) => actions.change({ by: value as View["by"] })),
      h("span", { class: "help" }, `${sumText(found.busy, busy)} in ${rangeText(range)}`),
    );
    if (!groups.length) return h("div", {}, controls, h("p", { class: "empty" }, "No event of the selection matches."));
    const name = (group: Total) => group.name || "(none)";
    const part = (group: Total) => (busy ? group.self / busy : 0);
    const costs: readonly Column<Total>[] = [
      { key: "flops", title: "FLOPs", kind: "number", value: (group) => group.flops, show: (group) => flops(group.flops!) },
      { key: "bytes", title: "bytes", kind: "number", value: (group) => group.bytes, show: (group) => bytes(group.bytes!) },
      by === "line"
        ? { key: "example", title: "example", kind: "text", value: (group) => group.kind.name }
        : { key: "line", title: "line", kind: "text", value: (group) => group.kind.line ?? group.kind.package_line ?? "", show: (group) => this.line(group.kind) },
    ];
    const columns: readonly Column<Total>[] = [
      { key: "name", title: titleOf(view, by), kind: "text", value: name, show: (group) => button(name(group), () => actions.filter(by, group.name), { class: "link", title: "Show only these events" }) },
      { key: "self", title: "self", kind: "number", value: (group) => group.self * 1e-12, show: (group) => picoseconds(group.self) },
      { key: "share", title: "% of busy", kind: "number", value: part, show: (group) => share(part(group)) },
      { key: "occurrences", title: "occurrences", kind: "number", value: (group) => group.count, show: (group) => count(group.count) },
      ...(view.of === "thread" ? [] : costs),
    ];
    return h("div", {}, controls, grid("ops", groups, columns, view, actions, "-self"));
  }

  /** Chooses the lanes whose times are summed; only captures with samples have Python stacks. */
  private timesOf(view: View): HTMLElement {
    const known = LANES.filter((type) => this.capture.lanes.some((lane) => lane.type === type));
    return select("time of", known.map((type) => [type, TIMES[type]] as const), view.of, (of) => this.actions.change({ of: of as View["of"] }));
  }

  /** A kind's line as a link to its source, with the line in a package below it. */
  private line(kind: Kind): HTMLElement | string {
    if (!kind.line) return kind.package_line ?? "";
    return this.place(kind.line);
  }

  private place(line: string, text = line): HTMLElement | string {
    if (!this.capture.sources.has(line.replace(/:\d+$/, ""))) return text;
    return button(text, () => this.actions.change({ tab: "source", source: line }), { class: "link", title: "Show the source" });
  }

  private operation(program: string, name: string): HTMLElement | string {
    const value = `${program}: ${name}`;
    if (!this.operations.has(value)) return name || "(none)";
    return button(name, () => this.actions.filter("op", value), { class: "link", title: "Show only these events" });
  }

  private event({ view }: Shown): HTMLElement {
    const { event } = view;
    if (event === null) return h("p", { class: "empty" }, "No event is chosen. Click one, or press Enter on the timeline.");
    const { capture, actions } = this;
    const kind = capture.kinds[capture.kind[event]!]!;
    const lane = laneOf(capture, event);
    const [start, end] = [capture.start[event]!, capture.end[event]!];
    const facts: (readonly [string, string | HTMLElement])[] = [
      ["name", kind.name],
      ["lane", `${lane.group}, ${lane.name}`],
      ["start", picoseconds(start)],
      ["duration", picoseconds(end - start)],
      ["self", picoseconds(capture.self[event]!)],
    ];
    for (const field of ["module", "category", "kernel", "layer", "scope", "pass", "opcode", "op_name", "package_line"] as const) {
      if (kind[field]) facts.push([field.replace("_", " "), kind[field]]);
    }
    if (kind.line) facts.push(["line", this.line(kind)]);
    if (kind.flops != null) facts.push(["FLOPs", flops(kind.flops)]);
    if (kind.bytes != null) facts.push(["bytes", bytes(kind.bytes)]);
    if (kind.origin && kind.origin !== "own" && kind.origin !== "none") facts.push(["line and scope from", `its ${kind.origin}`]);
    const list = h("dl", { class: "facts" }, ...facts.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, value))));
    const doing = h(
      "div",
      { class: "controls" },
      button("Zoom to it", () => actions.fit([start, end])),
      button("Select its time", () => actions.change({ selection: [start, end], step: "" })),
      kind.type === "step" ? null : button(`All of this name: ${this.executions(event)}`, () => actions.filter(kind.type === "operation" || kind.type === "collective" ? "op" : "name", valueOf(kind, "op"))),
      kind.line ? button("All of this line", () => actions.filter("line", kind.line!)) : null,
      ...(kind.changes ?? []).map((change) => button(`All of ${change}`, () => actions.filter("change", change))),
    );
    return h("div", { class: "scroll" }, doing, list, this.dispatch(event), this.tableLinks(kind), this.stack(kind));
  }

  /** Links along the arrows: to the event that dispatched this one, and to the first operations that it dispatched. */
  private dispatch(event: number): HTMLElement | null {
    const { capture, actions } = this;
    const source = capture.dispatchedBy[event]! - 1;
    const targets = targetsOf(capture.arrows, event);
    const name = (each: number) => capture.kinds[capture.kind[each]!]!.name;
    const link = (each: number, text: string) => button(text, () => actions.event(each), { class: "link" });
    const later = (from: number, to: number) => picoseconds(capture.start[to]! - capture.start[from]!);
    if (source >= 0) return h("p", { class: "controls" }, "Dispatched by ", link(source, name(source)), `${later(source, event)} before it starts.`);
    if (!targets.length) return null;
    const links = targets.map((each) => link(each, `${name(each)} on ${laneOf(capture, each).group}, ${later(event, each)} later`));
    return h("p", { class: "controls" }, "Dispatches ", ...links);
  }

  /** The number of executions with their shortest, mean and longest duration. */
  private executions(event: number): string {
    const { capture } = this;
    let [number_, sum, least, most] = [0, 0, Infinity, 0];
    for (let i = 0; i < capture.kind.length; i++) {
      if (capture.kind[i] !== capture.kind[event]) continue;
      const duration = capture.end[i]! - capture.start[i]!;
      number_++;
      sum += duration;
      least = Math.min(least, duration);
      most = Math.max(most, duration);
    }
    return `${count(number_)}, ${picoseconds(least)} to ${picoseconds(most)}, mean ${picoseconds(sum / number_)}`;
  }

  private tableLinks(kind: Kind): HTMLElement | null {
    const fields = (["op", "name", "line", "module"] as const).filter((field) => valueOf(kind, field));
    const found = fields.flatMap((field) => (this.rows.get(rowKey(field, valueOf(kind, field))) ?? []).map((each) => ({ ...each, field })));
    for (const change of kind.changes ?? []) found.push(...(this.rows.get(rowKey("change", change)) ?? []).map((each) => ({ ...each, field: "name" as const })));
    const step = /^step (\d+)$/.exec(kind.name);
    if (kind.type === "step" && step) found.push(...(this.rows.get(rowKey("step", step[1]!)) ?? []).map((each) => ({ ...each, field: "name" as const })));
    if (!found.length) return null;
    const seen = new Set<string>();
    const links = found.filter(({ section }) => !seen.has(section) && seen.add(section));
    return h(
      "p",
      { class: "controls" },
      "In the tables: ",
      ...links.map(({ section, row }) => button(section.replaceAll("_", " "), () => visit(row), { class: "link" })),
    );
  }

  /** The Python stack, innermost first, with the frames of libraries between those of the user folded. */
  private stack(kind: Kind): HTMLElement | null {
    if (kind.stack === undefined) return null;
    const frames = this.capture.stacks[kind.stack]!.map((each) => this.capture.frames[each]!);
    const items: HTMLElement[] = [];
    let libraries: Frame[] = [];
    const fold = () => {
      if (libraries.length) {
        const packages = [...new Set(libraries.map((frame) => frame.file.split("/")[0]!))].join(", ");
        const inside = h("ol", {}, ...libraries.map((frame) => h("li", {}, `${frame.function}  ${frame.file}:${frame.line}`)));
        items.push(h("li", { class: "library" }, h("details", {}, h("summary", {}, `${libraries.length} in ${packages}`), inside)));
      }
      libraries = [];
    };
    for (const frame of frames) {
      if (!frame.isUsers) {
        libraries.push(frame);
        continue;
      }
      fold();
      const place = `${frame.file}:${frame.line}`;
      items.push(h("li", {}, `${frame.function}  `, button(place, () => this.actions.change({ tab: "source", source: place }), { class: "link" })));
    }
    fold();
    return h("div", { class: "stack" }, h("h3", {}, "Python stack, innermost first"), h("ol", {}, ...items));
  }

  private source({ view, found }: Shown): HTMLElement {
    const listing = sourcePanel(this.capture, view, found, {
      open: (source) => this.actions.change({ source }),
      filter: (line) => this.actions.filter("frame", line),
    });
    listing.querySelector(".controls")?.append(this.timesOf(view));
    return listing;
  }

  private flame({ view, found, range, busy }: Shown): HTMLElement {
    if (!found.busy) return h("p", { class: "empty" }, "No event of the selection matches.");
    const controls = h(
      "div",
      { class: "controls" },
      this.timesOf(view),
      view.of === "operations" ? select("by", [["scope", "named scope"], ["stack", "Python stack"]], view.flame, (value) => this.actions.change({ flame: value as View["flame"] })) : null,
      h("span", { class: "help" }, `${sumText(found.busy, busy)} in ${rangeText(range)}`),
    );
    return h("div", {}, controls, flamePanel(flameTree(this.capture, found, view.flame), (field, value) => this.actions.filter(field, value)));
  }
}

const rangeText = (range: Range | null): string =>
  range ? `the selected ${picoseconds(range[1] - range[0])}` : "the whole capture";

const sumText = (part: number, whole: number): string =>
  whole - part > 1e-6 * whole ? `${picoseconds(part)} of ${picoseconds(whole)}` : picoseconds(whole);
