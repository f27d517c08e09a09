// The changes of a comparison, as `stack profile diff` has them, with links to events and source lines of both sides.

import type { Capture, Change } from "./data";
import { button, h, select } from "./dom";
import { general, seconds, share } from "./format";
import { type Column, grid, number, text } from "./grid";
import type { PanelActions, Shown } from "./panel";
import { DIFFS, SHOWN } from "./view";

const MEANS: Readonly<Record<(typeof SHOWN)[number], (row: Change) => boolean>> = {
  all: () => true,
  slower: (row) => row.verdict === "slower",
  faster: (row) => row.verdict === "faster",
  appeared: (row) => row.matched === "appeared",
  disappeared: (row) => row.matched === "disappeared",
  changed: (row) => /moved|other/.test(row.matched),
};

export function changesPanel(capture: Capture, { view }: Shown, actions: PanelActions): HTMLElement {
  const { tables, notes } = capture.changes!;
  const rows = tables[view.changes] ?? [];
  const said = (kind: (typeof SHOWN)[number]) => [kind, `${kind} (${rows.filter(MEANS[kind]).length})`] as const;
  const controls = h(
    "div",
    { class: "controls" },
    select("by", DIFFS.map((by) => [by, by]), view.changes, (by) => actions.change({ changes: by as (typeof DIFFS)[number], sort: "", rows: "" })),
    select("show", SHOWN.map(said), view.shown, (shown) => actions.change({ shown: shown as (typeof SHOWN)[number] })),
    h("span", { class: "help" }, "Seconds of a step. A row's name shows its events on both timelines."),
  );
  const name = (row: Change) => (row.label ? button(row.name || "(none)", () => actions.filter("change", row.label), { class: "link", title: "Show only these events" }) : row.name);
  const place = (side: 0 | 1) => (row: Change) => (row.places[side] ? actions.place(row.places[side], row.places[side].replace(/^\w+: /, "")) : "");
  const columns: readonly Column<Change>[] = [
    text("name", view.changes === "op" ? "operation" : view.changes, (row) => row.name || "(none)", name),
    number("before_s", "before", (row) => row.before_s, seconds),
    number("after_s", "after", (row) => row.after_s, seconds),
    number("change_s", "change", (row) => row.change_s, seconds),
    number("change_before_share", "% of before", (row) => row.change_before_share, share),
    number("low_s", "low", (row) => row.low_s, seconds),
    number("high_s", "high", (row) => row.high_s, seconds),
    number("own_change_s", "own change", (row) => row.own_change_s, seconds),
    number("p", "p", (row) => row.p, general),
    text("verdict", "verdict", (row) => row.verdict),
    text("matched", "matched", (row) => row.matched),
    text("before", "line before", (row) => row.places[0].replace(/^\w+: /, ""), place(0)),
    text("after", "line after", (row) => row.places[1].replace(/^\w+: /, ""), place(1)),
    text("category", "category", (row) => (view.changes === "category" ? "" : row.category)),
    text("layer", "layer", (row) => (view.changes === "layer" ? "" : row.layer)),
    text("package_line", "package line", (row) => row.package_line),
  ];
  return h("div", {}, controls, grid("changes", rows.filter(MEANS[view.shown]), columns, view, actions, ""), h("ul", { class: "notes" }, ...notes.map((note) => h("li", {}, note))));
}
