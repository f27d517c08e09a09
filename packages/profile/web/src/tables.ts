// The plain tables of the page: they sort by their headings, and their rows lead to events and back.

/** A click on a heading sorts numbers from the largest, texts from A; a second click reverses. What is not known stays last. */
export function sortTables(root: ParentNode): void {
  for (const button of root.querySelectorAll<HTMLButtonElement>("th button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")!));
  }
}

const isKnown = (cell: HTMLElement): boolean =>
  cell.classList.contains("number") ? cell.dataset["value"] !== undefined : cell.textContent !== "-";

function compare(a: HTMLElement, b: HTMLElement): number {
  if (a.classList.contains("number")) return Number(b.dataset["value"]) - Number(a.dataset["value"]);
  return a.textContent!.localeCompare(b.textContent!);
}

function sortBy(heading: HTMLTableCellElement): void {
  const column = heading.cellIndex;
  const sign = heading.getAttribute("aria-sort") === "descending" ? -1 : 1;
  for (const other of heading.parentElement!.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign === 1 ? "descending" : "ascending");
  const body = heading.closest("table")!.tBodies[0]!;
  const rows = [...body.rows].sort((one, two) => {
    const [a, b] = [one.cells[column]!, two.cells[column]!];
    return Number(isKnown(b)) - Number(isKnown(a)) || (isKnown(a) ? sign * compare(a, b) : 0);
  });
  body.append(...rows);
}

export interface TableRow {
  readonly section: string;
  readonly row: HTMLTableRowElement;
}

/** The rows of the page's tables by the field and value of the events that they lead to. */
export function indexRows(root: ParentNode): ReadonlyMap<string, readonly TableRow[]> {
  const found = new Map<string, TableRow[]>();
  for (const row of root.querySelectorAll<HTMLTableRowElement>("tr[data-events]")) {
    const section = row.closest("section")!.id;
    for (const [field, value] of new URLSearchParams(row.dataset["events"])) {
      const key = rowKey(field, value);
      found.set(key, [...(found.get(key) ?? []), { section, row }]);
    }
  }
  return found;
}

export const rowKey = (field: string, value: string): string => `${field}\0${value}`;

/** Scrolls to a row, and lets the keyboard go on from its link. */
export function visit(row: HTMLTableRowElement): void {
  for (const other of document.querySelectorAll("tr.found")) other.classList.remove("found");
  row.classList.add("found");
  row.scrollIntoView({ block: "center" });
  row.querySelector("a")?.focus({ preventScroll: true });
}
