// Puts the interactive view above the page's plain sections.

import { css, readPalette } from "./colours";
import { type Capture, isDerived, laneOf, readCapture } from "./data";
import { button, h, select } from "./dom";
import { count, picoseconds } from "./format";
import { Panel, type Shown } from "./panel";
import { longestMatch, matchCount, matchingKinds, nextMatch, rangeOf, sums } from "./query";
import { indexRows, sortTables } from "./tables";
import { align, stepName } from "./sides";
import { Timeline } from "./timeline";
import { EMPTY, type Field, FIELDS, formatView, parseView, type Range, type View } from "./view";

const HELP =
  "Wheel or w and s: zoom. a and d, Shift and drag: pan. Drag: select a time. Click or Enter: choose an event; arrows go to its " +
  "neighbours. /: search, n and p: next and previous match. f: zoom to the selection. 0: everything. Escape: clear.";

class Instrument {
  private view: View;
  private readonly timeline: Timeline;
  private readonly panel: Panel;
  private readonly bar = h("div", { class: "controls" });
  private readonly chips = h("div", { class: "controls chips" });
  private readonly legend = h("div", { class: "legend" });
  private readonly status = h("span", { class: "help", role: "status" });
  private readonly search = h("input");
  private readonly devices: string[];
  private mask: Uint8Array = new Uint8Array();
  private writing = 0;

  constructor(private readonly capture: Capture, root: HTMLElement) {
    this.devices = [...new Set(capture.lanes.map((lane) => lane.group))];
    this.view = this.sensible(parseView(location.hash) ?? { ...EMPTY, step: capture.changes?.step ?? "" });
    align(capture, this.view);
    this.timeline = new Timeline(
      capture,
      readPalette(capture),
      {
        window: (window) => this.change({ window }, false),
        selection: (selection) => this.change({ selection, step: "", window: this.timeline.visible, tab: this.view.tab === "event" ? "ops" : this.view.tab }),
        event: (event) => this.choose(event),
      },
      this.view,
    );
    this.panel = new Panel(capture, indexRows(document), {
      change: (change) => this.change(change),
      filter: (field, value) => this.change({ where: { ...this.view.where, [field]: value } }),
      fit: (range) => this.timeline.fit(range),
      event: (event) => this.choose(event, this.view.tab),
    });
    this.search.type = "search";
    this.search.placeholder = "name, line, layer, ... ( / )";
    this.search.setAttribute("aria-label", "Search events");
    this.search.addEventListener("input", () => this.change({ query: this.search.value }));
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.timeline.canvas.focus();
    });
    const help = h("p", { class: "help keys" }, HELP);
    help.id = "timeline-help";
    const left = capture.leftOut
      ? h("p", { class: "failure" }, `The shortest ${count(capture.leftOut)} events are left out of this view: --events of the command sets the limit.`)
      : null;
    root.append(this.bar, this.chips, left ?? "", this.timeline.element, this.legend, help, this.panel.element);
    this.paintLegend();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.timeline.repaint(readPalette(capture));
      this.paintLegend();
    });
    addEventListener("hashchange", () => this.arrive());
    // A link to the address that is there already changes nothing, and would go nowhere.
    document.addEventListener("click", (event) => {
      const link = (event.target as Element).closest("tr[data-events] a");
      if (link?.getAttribute("href") === location.hash) this.arrive();
    });
    document.addEventListener("keydown", (event) => this.key(event));
    let resizing = 0;
    addEventListener("resize", () => {
      clearTimeout(resizing);
      resizing = window.setTimeout(() => this.render(), 200);
    });
    this.render();
    if (parseView(location.hash)) this.arrive();
  }

  /** Leaves out what the capture does not have; sums are of threads if there are no devices. */
  private sensible(view: View): View {
    const { capture, devices } = this;
    const device = devices.includes(view.device) ? view.device : "";
    const event = view.event !== null && view.event < capture.kind.length ? view.event : null;
    const step = rangeOf(capture, { ...view, device, selection: null }) ? view.step : "";
    const meets = (range: Range | null) => range && range[1] > capture.from && range[0] < capture.to;
    return {
      ...view,
      device,
      event,
      step,
      window: meets(view.window) ? view.window : null,
      selection: meets(view.selection) ? view.selection : null,
      of: capture.lanes.some((lane) => lane.type === view.of) ? view.of : capture.lanes.some((lane) => lane.type === "operations") ? "operations" : "thread",
    };
  }

  /** Shows the view of the address, as a link of a table's row sets it, and chooses an event of it. */
  private arrive(): void {
    const found = parseView(location.hash);
    if (!found) return;
    const sensible = this.sensible(found);
    if (formatView(sensible) !== formatView(this.view)) {
      this.view = sensible;
      this.render();
      const isNamed = found.event === null && Object.keys(found.where).length > 0;
      const event = isNamed ? longestMatch(this.capture, this.view, this.mask, this.range) : null;
      if (event !== null) this.choose(event, this.view.tab);
    }
    const { event, window } = this.view;
    if (event !== null && !window) this.timeline.reveal(event);
    document.querySelector("#instrument")!.scrollIntoView({ block: "start" });
  }

  private get range(): Range | null {
    return rangeOf(this.capture, this.view);
  }

  private change(change: Partial<View>, everything = true): void {
    this.view = { ...this.view, ...change };
    if (everything) this.render();
    this.write();
  }

  private choose(event: number | null, tab: View["tab"] = "event"): void {
    this.change({ event, tab: event === null ? this.view.tab : tab });
    if (event === null) return;
    this.timeline.reveal(event);
    const kind = this.capture.kinds[this.capture.kind[event]!]!;
    const lane = laneOf(this.capture, event);
    const duration = picoseconds(this.capture.end[event]! - this.capture.start[event]!);
    this.status.textContent = `${kind.name}, ${duration} at ${picoseconds(this.capture.start[event]!)}, ${lane.group} ${lane.name}`;
  }

  /** Writes the address, at most every quarter of a second: browsers refuse more. */
  private write(): void {
    clearTimeout(this.writing);
    this.writing = window.setTimeout(() => {
      const text = formatView(this.view);
      // The frame of a notebook has an address of its own, which no link can name.
      if (!isFramed) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    }, 250);
  }

  private render(): void {
    const { capture, view } = this;
    if (align(capture, view)) this.timeline.forget();
    this.mask = matchingKinds(capture, view);
    const { range } = this;
    this.timeline.show(view, range, this.mask);
    const found = sums(capture, view, range, this.mask);
    const { busy } = this.mask.includes(0) ? sums(capture, view, range, null) : found;
    const shown: Shown = { view, range, found, busy, mask: this.mask };
    this.panel.show(shown);
    this.renderBar();
  }

  private renderBar(): void {
    const { capture, view } = this;
    if (this.search.value !== view.query) this.search.value = view.query;
    const devices = this.devices.map((group) => [group, group] as const);
    const steps = capture.lanes
      .filter((lane) => lane.type === "steps" && (lane.group === view.device || !view.device))
      .slice(0, 1)
      .flatMap((lane) => Array.from({ length: lane.limit - lane.first }, (_, i) => lane.first + i))
      .map((i) => {
        const name = stepName(capture.kinds[capture.kind[i]!]!).replace("step ", "");
        return [name, `${name} (${picoseconds(capture.end[i]! - capture.start[i]!)})`] as const;
      });
    const isFocused = this.bar.contains(document.activeElement) ? (document.activeElement as HTMLElement).dataset["control"] : undefined;
    const controls = [
      h("label", {}, this.search),
      button("↑", () => this.step(-1), { title: "Previous match (p)", aria: { label: "Previous match" } }),
      button("↓", () => this.step(1), { title: "Next match (n)", aria: { label: "Next match" } }),
      select("device", [["", "all"], ...devices], view.device, (device) => this.change({ device, step: "" })),
      steps.length ? select("step", [["", "all"], ...steps], view.step, (step) => this.change({ step, selection: null, window: null })) : null,
      button("−", () => this.timeline.zoom(1.6), { title: "Zoom out (s)", aria: { label: "Zoom out" } }),
      button("+", () => this.timeline.zoom(1 / 1.6), { title: "Zoom in (w)", aria: { label: "Zoom in" } }),
      button("All", () => this.change({ window: this.range ? this.timeline.whole : null }), { title: "Show the whole capture (0)" }),
      this.status,
    ].filter((each) => each !== null);
    const isSearch = document.activeElement === this.search;
    this.bar.replaceChildren(...controls);
    if (isSearch) this.search.focus();
    else if (isFocused) this.bar.querySelector<HTMLElement>(`[data-control="${isFocused}"]`)?.focus();
    this.bar.querySelectorAll<HTMLElement>("select").forEach((each, i) => (each.dataset["control"] = `select${i}`));
    this.chips.replaceChildren(...this.filters());
    const own = capture.lanes.reduce((sum, lane) => sum + (isDerived(lane) ? 0 : lane.limit - lane.first), 0);
    const isFiltered = view.query || Object.keys(view.where).length;
    this.status.textContent = isFiltered ? `${count(matchCount(capture, view, this.mask))} of ${count(own)} events match` : `${count(own)} events`;
  }

  private filters(): HTMLElement[] {
    const { view, range } = this;
    const chip = (text: string, remove: () => void) => button(`${text} ×`, remove, { class: "chip", title: "Remove", aria: { label: `Remove the filter ${text}` } });
    const found = FIELDS.filter((field) => view.where[field] !== undefined).map((field) =>
      chip(`${NAMES[field] ?? field}: ${view.where[field] || "(none)"}`, () => {
        const { [field]: _, ...where } = view.where;
        this.change({ where });
      }),
    );
    if (range) found.push(chip(`selected: ${picoseconds(range[1] - range[0])}`, () => this.change({ selection: null, step: "" })));
    return found;
  }

  private paintLegend(): void {
    const { legend } = readPalette(this.capture);
    this.legend.replaceChildren(
      ...legend.map(([category, colour]) => {
        const swatch = h("span", { class: "swatch" });
        swatch.style.background = css(colour);
        const isOne = this.capture.kinds.some((kind) => kind.category === category);
        const label = h("span", {}, swatch, category);
        return isOne ? button(label, () => this.toggle("category", category), { class: "link", title: "Show only these events" }) : label;
      }),
    );
  }

  private toggle(field: Field, value: string): void {
    const { [field]: old, ...where } = this.view.where;
    this.change({ where: old === value ? where : { ...where, [field]: value } });
  }

  private step(sign: 1 | -1): void {
    const { event } = this.view;
    const time = event === null ? (sign === 1 ? -Infinity : Infinity) : this.capture.start[event]!;
    const next = nextMatch(this.capture, this.view, this.mask, time, event, sign);
    if (next !== null) this.choose(next, this.view.tab);
    else this.status.textContent = "No further match";
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
    const isOnTimeline = target === this.timeline.canvas;
    const everywhere: Readonly<Record<string, () => void>> = {
      w: () => this.timeline.zoom(1 / 1.4),
      s: () => this.timeline.zoom(1.4),
      a: () => this.timeline.pan(-0.15),
      d: () => this.timeline.pan(0.15),
      f: () => this.focusRange(),
      n: () => this.step(1),
      p: () => this.step(-1),
      "0": () => this.change({ window: this.range ? this.timeline.whole : null }),
      "/": () => this.search.focus(),
      Escape: () => this.change({ selection: null, step: "", event: null, where: {}, query: "", tab: this.view.tab === "event" ? "ops" : this.view.tab }),
    };
    const here: Readonly<Record<string, () => void>> = {
      ArrowLeft: () => this.beside(-1, "column"),
      ArrowRight: () => this.beside(1, "column"),
      ArrowUp: () => this.beside(-1, "row"),
      ArrowDown: () => this.beside(1, "row"),
      Enter: () => (this.view.event === null ? this.step(1) : this.choose(this.view.event)),
    };
    const action = everywhere[event.key] ?? (isOnTimeline ? here[event.key] : undefined);
    if (!action) return;
    event.preventDefault();
    action();
  }

  private focusRange(): void {
    const { event } = this.view;
    const range = this.range ?? (event === null ? null : ([this.capture.start[event]!, this.capture.end[event]!] as const));
    if (range) this.timeline.fit(range);
  }

  private beside(sign: 1 | -1, axis: "row" | "column"): void {
    if (this.view.event === null) return this.step(1);
    const found = this.timeline.neighbour(this.view.event, sign, axis);
    if (found !== null) this.choose(found);
  }
}

const isFramed = location.href.startsWith("about:srcdoc");

/** In a frame, "#name" would be resolved against the address of the notebook, and leave the page. */
function followLinks(): void {
  document.addEventListener("click", (event) => {
    const href = (event.target as Element).closest("a")?.getAttribute("href");
    if (!href?.startsWith("#")) return;
    event.preventDefault();
    if (href.includes("=")) location.hash = href;
    else document.querySelector(href)?.scrollIntoView();
  });
}

const NAMES: Readonly<Partial<Record<Field, string>>> = { op: "name", under: "scope below", frame: "line on the stack", change: "changed" };

async function start(): Promise<void> {
  sortTables(document);
  if (isFramed) followLinks();
  const root = document.querySelector<HTMLElement>("#instrument");
  const data = document.querySelector("#capture");
  if (!root || !data) return;
  root.hidden = false;
  try {
    const capture = await readCapture(data.textContent!);
    if (capture.kind.length || capture.memory.length) new Instrument(capture, root);
    else root.append(h("p", { class: "empty" }, "No timeline: the trace has no events of devices or of the host's threads."));
  } catch (error) {
    root.append(h("p", { class: "failure", role: "alert" }, `The timeline cannot be shown: ${error}. The sections below are complete.`));
  }
  root.dataset["ready"] = "true";
}

void start();
