// Tables of the panel: they sort by their headings and filter their rows, and the address has both.

import { button, h } from "./dom";
import { count } from "./format";
import type { View } from "./view";

export interface Column<Row> {
  readonly key: string; // in the address
  readonly title: string;
  readonly kind: "text" | "number";
  readonly value: (row: Row) => string | number | null;
  readonly show?: (row: Row) => Node | string; // instead of the value itself
}

/** A column of numbers, which shows them in a form. */
export const number = <Row>(key: string, title: string, value: (row: Row) => number | null, form: (value: number) => string): Column<Row> => ({
  key,
  title,
  kind: "number",
  value,
  show: (row) => form(value(row)!),
});

/** A column of texts. */
export const text = <Row>(key: string, title: string, value: (row: Row) => string, show?: (row: Row) => Node | string): Column<Row> => ({ key, title, kind: "text", value, ...(show ? { show } : {}) });

export interface GridActions {
  change(view: Partial<View>): void;
}

const MOST_ROWS = 400;

/** A table of rows, sorted by `first` unless the address names another of its columns; "-" sorts from the largest. */
export function grid<Row>(label: string, rows: readonly Row[], columns: readonly Column<Row>[], view: View, actions: GridActions, first: string): HTMLElement {
  const isKnown = columns.some((column) => column.key === view.sort.replace(/^-/, ""));
  const sort = isKnown ? view.sort : first;
  const query = view.rows.toLowerCase();
  const texts = columns.filter((column) => column.kind === "text");
  const matching = query ? rows.filter((row) => texts.some((column) => String(column.value(row) ?? "").toLowerCase().includes(query))) : rows;
  const sorted = sortRows(matching, columns, sort);
  // A column in which nothing is known is left out, as on the terminal.
  const shown = columns.filter((column) => rows.some((row) => column.value(row) !== null && column.value(row) !== ""));
  const heads = shown.map((column) => {
    const isSorted = sort.replace(/^-/, "") === column.key;
    const other = isSorted ? (sort.startsWith("-") ? column.key : `-${column.key}`) : column.kind === "number" ? `-${column.key}` : column.key;
    const head = h("th", { class: column.kind }, button(column.title, () => actions.change({ sort: other === first ? "" : other }), { data: { focus: `sort ${column.key}` } }));
    head.scope = "col";
    if (isSorted) head.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
    return head;
  });
  const body = sorted.slice(0, MOST_ROWS).map((row) => h("tr", {}, ...shown.map((column) => cell(column, row))));
  const table = h("table", { class: "sums", aria: { label } }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...body));
  const more = sorted.length > MOST_ROWS ? h("p", { class: "empty" }, `The first ${MOST_ROWS} of ${count(sorted.length)} rows; a filter finds the others.`) : null;
  const none = sorted.length ? null : h("p", { class: "empty" }, "No row has this text.");
  return h("div", {}, filterOf(label, rows.length, sorted.length, view, actions), h("div", { class: "scroll" }, table, none, more));
}

function sortRows<Row>(rows: readonly Row[], columns: readonly Column<Row>[], sort: string): readonly Row[] {
  const column = columns.find((each) => each.key === sort.replace(/^-/, ""));
  if (!column) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const isMissing = (value: string | number | null) => value === null || value === "";
  return [...rows].sort((one, two) => {
    const [a, b] = [column.value(one), column.value(two)];
    if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b)); // unknown values stay last
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  });
}

function cell<Row>(column: Column<Row>, row: Row): HTMLTableCellElement {
  const value = column.value(row);
  const isNumber = column.kind === "number" && value !== null;
  return h("td", { class: column.kind, data: isNumber ? { value: String(value) } : {} }, value === null ? "-" : (column.show?.(row) ?? String(value)));
}

function filterOf(label: string, all: number, found: number, view: View, actions: GridActions): HTMLElement {
  const input = h("input", { type: "search", placeholder: "filter rows", data: { focus: "rows" }, aria: { label: `Filter rows of ${label}` } });
  input.value = view.rows;
  input.addEventListener("input", () => actions.change({ rows: input.value }));
  const said = `${view.rows ? `${count(found)} of ` : ""}${count(all)} ${all === 1 ? "row" : "rows"}`;
  return h("div", { class: "controls" }, input, h("span", { class: "help", role: "status" }, said));
}
