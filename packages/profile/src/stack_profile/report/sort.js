"use strict";
// A click on a heading sorts its table: numbers from the largest, texts from A; a second click reverses. What is not known stays last.
const known = (cell) => (cell.className === "number" ? "value" in cell.dataset : cell.textContent !== "-");
const compare = (a, b) =>
  a.className === "number" ? b.dataset.value - a.dataset.value : a.textContent.localeCompare(b.textContent);
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const column = heading.cellIndex;
    const sign = heading.getAttribute("aria-sort") === "descending" ? -1 : 1;
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", sign === 1 ? "descending" : "ascending");
    const body = heading.closest("table").tBodies[0];
    const order = (one, two) => {
      const [a, b] = [one.cells[column], two.cells[column]];
      return known(b) - known(a) || (known(a) ? sign * compare(a, b) : 0);
    };
    body.append(...[...body.rows].sort(order));
  });
}
