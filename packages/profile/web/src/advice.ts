// Advice: avoidable time by cause, the largest gain first, with links to its events and lines.

import type { Capture } from "./data";
import { h } from "./dom";
import { seconds, share } from "./format";
import type { PanelActions } from "./panel";

export function advicePanel(capture: Capture, actions: PanelActions): HTMLElement {
  const { advice } = capture;
  if (!advice) return h("p", { class: "empty" }, `The advice could not be made. ${capture.failures["advice"] ?? ""}`);
  const items = advice.rows.map((row) => {
    const part = row.gain_elapsed_share === null ? "" : `, ${share(row.gain_elapsed_share)} of the elapsed time`;
    const links = [
      row.address ? h("a", { href: `#tab=ops&${row.address}` }, row.program ? "its events" : `events of ${row.event}`) : null,
      row.line ? actions.place(row.line) : null,
    ].filter((each) => each !== null);
    return h(
      "li",
      { data: { cause: row.cause, gain: String(row.gain_s) } },
      h("h3", {}, `${row.cause}: about ${seconds(row.gain_s)}${part}`),
      h("p", {}, row.evidence, "."),
      h("p", { class: "remedy" }, row.change),
      links.length ? h("p", { class: "controls" }, ...links) : null,
    );
  });
  return h(
    "div",
    {},
    h("p", { class: "help" }, "Of the whole capture, whichever step and device are chosen."),
    items.length ? h("ol", { class: "advice" }, ...items) : h("p", { class: "empty" }, "No cause takes a considerable part of the time."),
    h("ul", { class: "notes" }, ...advice.notes.map((note) => h("li", {}, note))),
  );
}
