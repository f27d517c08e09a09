// Lines of the user's files, with the time, FLOPs and bytes of the operations that they made.

import type { Capture } from "./data";
import { button, h, select } from "./dom";
import { bytes, flops, picoseconds } from "./format";
import type { Sums } from "./query";
import type { View } from "./view";

interface LineSum {
  self: number; // of operations whose innermost line of the user's it is
  total: number; // of operations that have it anywhere on their stack
  flops: number | null;
  bytes: number | null;
}

type Files = ReadonlyMap<string, ReadonlyMap<number, LineSum>>;

/** Sums of the lines of the user's files, by file and line. */
export function lineSums(capture: Capture, found: Sums): Files {
  const files = new Map<string, Map<number, LineSum>>();
  const line = (file: string, number: number): LineSum => {
    const lines = files.get(file) ?? new Map<number, LineSum>();
    const sum = lines.get(number) ?? { self: 0, total: 0, flops: null, bytes: null };
    files.set(file, lines.set(number, sum));
    return sum;
  };
  capture.kinds.forEach((kind, i) => {
    if (!found.count[i]) return;
    if (kind.line && kind.file && capture.sources.has(kind.file)) {
      const sum = line(kind.file, Number(kind.line.slice(kind.file.length + 1)));
      sum.self += found.self[i]!;
      if (kind.flops != null) sum.flops = (sum.flops ?? 0) + kind.flops * found.times[i]!;
      if (kind.bytes != null) sum.bytes = (sum.bytes ?? 0) + kind.bytes * found.times[i]!;
    }
    if (kind.stack === undefined) return;
    const places = new Set(capture.stacks[kind.stack]!.filter((each) => capture.frames[each]!.isUsers));
    const seen = new Set<LineSum>();
    for (const place of places) {
      const frame = capture.frames[place]!;
      const sum = line(frame.file, frame.line);
      if (!seen.has(sum)) sum.total += found.self[i]!;
      seen.add(sum);
    }
  });
  return files;
}

export interface SourceActions {
  open(source: string): void;
  filter(line: string): void;
}

/** Builds the view of one file; `view.source` is its name, with ":line" to mark a line. */
export function sourcePanel(capture: Capture, view: View, found: Sums, actions: SourceActions): HTMLElement {
  const files = lineSums(capture, found);
  const sumOf = (name: string) => [...(files.get(name)?.values() ?? [])].reduce((sum, line) => sum + line.self, 0);
  const names = [...capture.sources.keys()].sort((a, b) => sumOf(b) - sumOf(a) || a.localeCompare(b));
  if (!names.length) {
    return h("p", { class: "empty" }, "No line of a file of yours is on the stack of any operation.");
  }
  const [, asked = "", marked = ""] = /^(.*?)(?::(\d+))?$/s.exec(view.source) ?? [];
  const name = capture.sources.has(asked) ? asked : names[0]!;
  const options = names.map((each) => [each, `${each} (${picoseconds(sumOf(each))})`] as const);
  const { lines, note } = capture.sources.get(name)!;
  const sums = files.get(name) ?? new Map<number, LineSum>();
  const largest = Math.max(...[...sums.values()].map((sum) => sum.total), 1);
  // Without the text, the lines that have sums stand alone.
  const numbers = lines ? lines.map((_, i) => i + 1) : [...sums.keys()].sort((a, b) => a - b);
  const rows = numbers.map((number) => {
    const sum = sums.get(number);
    const place = `${name}:${number}`;
    const text = h("td", { class: "code" }, lines?.[number - 1] ?? "");
    if (sum) {
      const share = (100 * sum.total) / largest;
      text.style.background = `linear-gradient(90deg, var(--heat) ${share}%, transparent ${share}%)`;
    }
    const row = h(
      "tr",
      { class: number === Number(marked) ? "found" : "" },
      cell(sum?.self, picoseconds),
      cell(sum?.total, picoseconds),
      cell(sum?.flops, flops),
      cell(sum?.bytes, bytes),
      h(
        "td",
        { class: "line" },
        sum
          ? button(String(number), () => actions.filter(place), { title: `Show the events of line ${number}` })
          : String(number),
      ),
      text,
    );
    row.dataset["line"] = String(number);
    return row;
  });
  const heads = ["self", "total", "FLOPs", "bytes", "line", "source"].map((title) =>
    h("th", { class: title === "source" ? "text" : "number", title: TITLES[title] ?? "" }, title),
  );
  const table = h("table", { class: "listing" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows));
  const scroller = h("div", { class: "scroll" }, table);
  const target = rows.find((row) => row.classList.contains("found")) ?? rows.find((row) => sums.get(Number(row.dataset["line"]))?.self);
  // Only the listing scrolls, not the page.
  if (target) requestAnimationFrame(() => (scroller.scrollTop = target.offsetTop - scroller.clientHeight / 3));
  return h(
    "div",
    {},
    h("div", { class: "controls" }, select("file", options, name, actions.open)),
    note ? h("p", { class: "failure", role: "status" }, note) : null,
    scroller,
  );
}

const TITLES: Readonly<Record<string, string>> = {
  self: "time of operations or samples of which this is the innermost line of yours",
  total: "time of operations or samples that have this line anywhere on their Python stack",
  FLOPs: "of the operations of self",
  bytes: "main-memory traffic of the operations of self",
};

function cell(value: number | null | undefined, form: (value: number) => string): HTMLTableCellElement {
  const isKnown = value !== undefined && value !== null && value !== 0;
  return h("td", { class: "number", data: value == null ? {} : { value: String(value) } }, isKnown ? form(value) : "");
}
