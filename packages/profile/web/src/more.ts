// The other analyses, also those of other distributions: the plots and tables of their sections.

import { h, select } from "./dom";
import type { PanelActions } from "./panel";
import { sortTables } from "./tables";
import type { View } from "./view";

const OWN = ["advice", "ops", "roofline", "memory", "graph", "communication", "input_pipeline", "compile"]; // have views

export function morePanel(view: View, actions: PanelActions): HTMLElement {
  const sections = [...document.querySelectorAll<HTMLElement>("main > section")].filter(({ id }) => !OWN.includes(id));
  const found = sections.find(({ id }) => id === view.section) ?? sections[0];
  if (!found) return h("p", { class: "empty" }, "There are no other analyses.");
  const copy = found.cloneNode(true) as HTMLElement;
  copy.removeAttribute("id");
  copy.querySelector("h2")?.remove();
  sortTables(copy);
  const names = sections.map(({ id }) => [id, id.replaceAll("_", " ")] as const);
  const said = h("span", { class: "help" }, "of the whole capture, whichever step and device are chosen");
  return h("div", { class: "analysis" }, h("div", { class: "controls" }, select("analysis", names, found.id, (section) => actions.change({ section })), said), copy);
}
