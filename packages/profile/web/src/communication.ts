// Views of the lanes that analyses derived: collectives, compilations, and stages of the input pipeline.

import { type Capture, firstEndingAfter, type Kind, type Lane } from "./data";
import { button, h, select } from "./dom";
import { bytes, count, picoseconds, seconds, share } from "./format";
import { type Column, grid, number, text } from "./grid";
import type { PanelActions, Shown } from "./panel";
import { isChosen, isGroup, matchingKinds, sums, valueOf } from "./query";
import { cutSelfTimes } from "./self_times";
import { COLLECTIVES, type Range, type View } from "./view";

interface LaneSum {
  readonly kind: Kind;
  readonly lane: Lane;
  count: number; // events that overlap the range
  times: number; // executions, those that the range cuts in part
  time: number; // picoseconds from start to end, in the range
  self: number; // of collectives exposed, of stages without the stages that they call
  extra: number; // of collectives waits, of stages waits with an idle device
  known: number; // executions whose extra time is known
  knownTime: number;
  longest: number; // the event with the most time
}

/** Sums of the events of one type of derived lane by kind and lane, of which the range cuts events in proportion. */
export function laneSums(capture: Capture, view: View, type: Lane["type"], range: Range | null): LaneSum[] {
  const mask = matchingKinds(capture, view);
  const found = new Map<string, LaneSum>();
  const [from, to] = range ?? [-Infinity, Infinity];
  for (const lane of capture.lanes) {
    if (lane.type !== type || !isChosen(lane, view)) continue;
    const cut = range && type === "input" ? cutSelfTimes(capture, lane, from, to) : null;
    for (let i = firstEndingAfter(capture, lane, from); i < lane.limit && capture.start[i]! < to; i++) {
      const [start, end, place] = [capture.start[i]!, capture.end[i]!, capture.kind[i]!];
      if (end <= from || !mask[place]) continue;
      const key = `${place}\0${lane.index}`;
      const sum: LaneSum = found.get(key) ?? { kind: capture.kinds[place]!, lane, count: 0, times: 0, time: 0, self: 0, extra: 0, known: 0, knownTime: 0, longest: i };
      found.set(key, sum);
      const time = Math.min(end, to) - Math.max(start, from);
      const part = end > start ? time / (end - start) : 1;
      const own = cut?.get(i) ?? capture.self[i]! * part;
      sum.count++;
      sum.times += part;
      sum.time += time;
      sum.self += own;
      if (capture.extra[i]! >= 0) {
        sum.extra += capture.extra[i]! * (capture.self[i]! && type === "input" ? own / capture.self[i]! : part);
        sum.known += part;
        sum.knownTime += time;
      }
      if (end - start > capture.end[sum.longest]! - capture.start[sum.longest]!) sum.longest = i;
    }
  }
  return [...found.values()];
}

const link = (name: string, longest: number | null, actions: PanelActions): HTMLElement | string =>
  longest === null ? name || "(none)" : button(name || "(none)", () => actions.event(longest), { class: "link", title: "Show its longest event" });

const notesOf = (notes: readonly string[] | undefined): HTMLElement => h("ul", { class: "notes" }, ...(notes ?? []).map((note) => h("li", {}, note)));

const by = <Row>(rows: readonly Row[], key: (row: Row) => string): Map<string, Row[]> => {
  const groups = new Map<string, Row[]>();
  for (const row of rows) groups.set(key(row), [...(groups.get(key(row)) ?? []), row]);
  return groups;
};

const sum = <Row>(rows: readonly Row[], value: (row: Row) => number): number => rows.reduce((total, row) => total + value(row), 0);

interface Collective {
  readonly name: string;
  readonly kinds: string;
  readonly axis: string;
  readonly line: string;
  readonly count: number;
  readonly array: number | null; // bytes of one device
  readonly sent: number | null;
  readonly time_s: number;
  readonly wait_s: number | null;
  readonly exposed_s: number;
  readonly rate: number | null;
  readonly longest: number;
}

export function communicationPanel(capture: Capture, { view, range }: Shown, actions: PanelActions): HTMLElement {
  const all = laneSums(capture, view, "collectives", range);
  const devices = new Set(capture.lanes.filter((lane) => lane.type === "operations" && isChosen(lane, view)).map((lane) => lane.group)).size;
  const { busy } = sums(capture, { ...view, of: "operations" }, range, null);
  const busy_s = busy * 1e-12;
  const links = capture.communication?.link_bytes_s ?? null;
  const rows = collectives(all, view.collectives, devices);
  const exposed_s = sum(rows, (row) => row.exposed_s);
  const controls = h(
    "div",
    { class: "controls" },
    select("by", COLLECTIVES.map((each) => [each, each === "op" ? "name" : each]), view.collectives, (value) => actions.change({ collectives: value as View["collectives"] })),
    h("span", { class: "help" }, rows.length ? `${seconds(exposed_s)} exposed, ${share(busy_s ? exposed_s / busy_s : 0)} of the busy time of ${count(devices)} devices` : ""),
  );
  const notes = notesOf(capture.communication?.notes);
  if (!rows.length) return h("div", {}, controls, h("p", { class: "empty" }, "No collective ran in the selection."), notes);
  const columns: Column<Collective>[] = [
    text("name", view.collectives === "op" ? "name" : view.collectives, (row) => row.name || "(none)", (row) => link(row.name, row.longest, actions)),
    ...(view.collectives === "kind" ? [] : [text<Collective>("kind", "kind", (row) => row.kinds)]),
    ...(view.collectives === "axis" ? [] : [text<Collective>("axis", "axis", (row) => row.axis)]),
    number("occurrences", "occurrences", (row) => row.count, count),
    number("array", "array", (row) => row.array, bytes),
    number("sent", "sent", (row) => row.sent, bytes),
    number("time", "time", (row) => row.time_s, seconds),
    number("wait", "wait", (row) => row.wait_s, seconds),
    number("exposed", "exposed", (row) => row.exposed_s, seconds),
    number("hidden", "hidden", (row) => Math.max(row.time_s - row.exposed_s, 0), seconds),
    number("busy", "exposed % of busy", (row) => (busy_s ? row.exposed_s / busy_s : null), share),
    number("rate", "B/s", (row) => row.rate, bytes),
    number("link", "% of link", (row) => (row.rate !== null && links ? row.rate / links : null), share),
    ...(view.collectives === "line" ? [] : [text<Collective>("line", "line", (row) => row.line, (row) => actions.place(row.line))]),
  ];
  return h("div", {}, controls, bars(rows, actions), grid("collectives", rows, columns, view, actions, "-exposed"), notes);
}

function collectives(all: readonly LaneSum[], grouping: View["collectives"], devices: number): Collective[] {
  const key = ({ kind }: LaneSum) => (grouping === "kind" ? (kind.collective ?? "") : grouping === "axis" ? (kind.axis ?? "") : valueOf(kind, grouping));
  return [...by(all, key)].map(([name, members]) => {
    const isKnown = members.every(({ kind }) => kind.sent_bytes != null);
    const waits = members.filter((each) => each.known > 0);
    const lines = new Set(members.map(({ kind }) => kind.line ?? ""));
    // As in the analysis: of executions with a known wait if there are any, without that wait.
    const sent = sum(members, (each) => (each.kind.sent_bytes ?? 0) * (each.known || each.times));
    const talking = sum(members, (each) => (each.known ? each.knownTime - each.extra : each.time)) * 1e-12;
    return {
      name,
      kinds: [...new Set(members.map(({ kind }) => kind.collective ?? ""))].join(", "),
      axis: [...new Set(members.map(({ kind }) => kind.axis ?? ""))].filter(Boolean).join(" and "),
      line: lines.size === 1 ? [...lines][0]! : "",
      count: sum(members, (each) => each.count),
      array: isKnown ? sum(members, (each) => (each.kind.array_bytes ?? 0) * each.times) / devices : null,
      sent: isKnown ? sum(members, (each) => (each.kind.sent_bytes ?? 0) * each.times) / devices : null,
      time_s: sum(members, (each) => each.time) * 1e-12,
      wait_s: waits.length ? sum(waits, (each) => each.extra) * 1e-12 : null,
      exposed_s: sum(members, (each) => each.self) * 1e-12,
      rate: isKnown && talking > 0 ? sent / talking : null,
      longest: members.reduce((a, b) => (b.time > a.time ? b : a)).longest,
    };
  });
}

/** Exposed and hidden time of the largest rows, beside each other. */
function bars(rows: readonly Collective[], actions: PanelActions): HTMLElement {
  const shown = [...rows].sort((a, b) => b.exposed_s - a.exposed_s).slice(0, 8);
  const longest = Math.max(...shown.map((row) => row.time_s), 1e-12);
  const items = shown.flatMap((row) => {
    const bar = (name: string, part: number) => {
      const element = h("span", { class: `part ${name}`, title: `${name} ${seconds(part)}` });
      element.style.width = `${(100 * part) / longest}%`;
      return element;
    };
    return [
      h("span", { class: "label" }, link(row.name, row.longest, actions)),
      h("span", { class: "bar" }, bar("exposed", row.exposed_s), bar("hidden-time", Math.max(row.time_s - row.exposed_s, 0))),
      h("span", { class: "value" }, `${seconds(row.exposed_s)} of ${seconds(row.time_s)}`),
    ];
  });
  const legend = h("p", { class: "help" }, h("span", { class: "swatch exposed" }), "exposed ", h("span", { class: "swatch hidden-time" }), "hidden by other operations");
  return h("div", { class: "stacked" }, legend, h("div", { class: "bars" }, ...items));
}

interface Compiled {
  readonly name: string;
  readonly programs: number;
  readonly count: number | null;
  readonly time_s: number | null;
  readonly why: string;
  readonly longest: number | null;
}

export function compilePanel(capture: Capture, { view, range }: Shown, actions: PanelActions): HTMLElement {
  const found = by(laneSums(capture, { ...view, device: "" }, "compile", range), ({ kind }) => kind.name);
  const rows: Compiled[] = (capture.compile?.rows ?? []).map(([name, programs, why, isKnown]) => {
    const events = found.get(name) ?? [];
    return {
      name,
      programs,
      why,
      count: isKnown ? sum(events, (each) => each.count) : null,
      time_s: isKnown ? sum(events, (each) => each.time) * 1e-12 : null,
      longest: events[0]?.longest ?? null,
    };
  });
  const notes = notesOf(capture.compile?.notes);
  if (!rows.length) return h("div", {}, h("p", { class: "empty" }, "No program was loaded, and nothing was compiled."), notes);
  const columns: Column<Compiled>[] = [
    text("name", "function", (row) => row.name || "(unknown)", (row) => link(row.name || "(unknown)", row.longest, actions)),
    number("time", "compile time", (row) => row.time_s, seconds),
    number("compilations", "compilations", (row) => row.count, count),
    number("programs", "programs", (row) => row.programs, count),
    text("why", "differences of their arguments", (row) => row.why),
  ];
  const total = sum(rows, (row) => row.time_s ?? 0);
  const said = h("p", { class: "help" }, `${seconds(total)} of compilation ${range ? `in the selected ${picoseconds(range[1] - range[0])}` : "in the whole capture"}; programs are those loaded in the whole capture.`);
  return h("div", {}, said, grid("compilations", rows, columns, view, actions, "-time"), notes);
}

interface Stage {
  readonly name: string;
  readonly kind: string;
  readonly threads: number;
  readonly calls: number;
  readonly self_s: number;
  readonly waited_s: number;
  readonly idle_s: number;
  readonly detail: string;
  readonly longest: number;
}

export function inputPanel(capture: Capture, { view, range }: Shown, actions: PanelActions): HTMLElement {
  // A device's input is of its host, which the device picker does not name.
  const isHost = capture.input?.processes.some(({ group }) => group === view.device);
  const own = isHost ? view : { ...view, device: "" };
  const processes = (capture.input?.processes ?? []).filter(({ group }) => isGroup(group, own));
  const [from, to] = range ?? [-Infinity, Infinity];
  const steps_s = sum(processes, ({ start, end }) => Math.max(Math.min(end, to) - Math.max(start, from), 0)) * 1e-12;
  const found = by(laneSums(capture, own, "input", range), ({ kind }) => JSON.stringify([kind.name, kind.category, kind.detail]));
  const rows: Stage[] = [...found.values()].map((members) => {
    const calling = members.filter(({ kind }) => kind.calling);
    return {
      name: members[0]!.kind.name,
      kind: members[0]!.kind.category ?? "",
      detail: members[0]!.kind.detail ?? "",
      threads: new Set(members.map(({ lane }) => lane.index)).size,
      calls: sum(members, (each) => each.count),
      self_s: sum(members, (each) => each.self) * 1e-12,
      waited_s: sum(calling, (each) => each.self) * 1e-12,
      idle_s: sum(calling, (each) => each.extra) * 1e-12,
      longest: members.reduce((a, b) => (b.time > a.time ? b : a)).longest,
    };
  });
  const notes = notesOf(capture.input?.notes);
  if (!rows.length) return h("div", {}, h("p", { class: "empty" }, "No stage of an input pipeline ran in the selection, during steps."), notes);
  const part = (value: number): number | null => (steps_s ? value / steps_s : null);
  const columns: Column<Stage>[] = [
    text("stage", "stage", (row) => row.name, (row) => link(row.name, row.longest, actions)),
    text("kind", "kind", (row) => row.kind),
    number("threads", "threads", (row) => row.threads, count),
    number("calls", "calls", (row) => row.calls, count),
    number("self", "self", (row) => row.self_s, seconds),
    number("call", "self per call", (row) => row.self_s / row.calls, seconds),
    number("waited", "waited", (row) => row.waited_s, seconds),
    number("waited_share", "waited % of steps", (row) => part(row.waited_s), share),
    number("idle", "with an idle device", (row) => row.idle_s, seconds),
    number("idle_share", "idle % of steps", (row) => part(row.idle_s), share),
    text("detail", "detail", (row) => row.detail),
  ];
  const said = `The program waited ${seconds(sum(rows, (row) => row.waited_s))} for input in ${seconds(steps_s)} of steps, ${seconds(sum(rows, (row) => row.idle_s))} of it while a device was idle.`;
  return h("div", {}, h("p", { class: "help" }, said), grid("input stages", rows, columns, view, actions, "-idle"), notes);
}
