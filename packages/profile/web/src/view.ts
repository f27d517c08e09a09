// What the page shows, as it stands in the address: a link opens the same view.

export const FIELDS = ["op", "name", "line", "file", "layer", "scope", "under", "category", "pass", "module", "kernel", "frame", "change"] as const;
export type Field = (typeof FIELDS)[number];
export const TABS = ["changes", "ops", "advice", "event", "source", "flame", "roofline", "memory", "graph", "communication", "input", "compile", "more"] as const;
export type Tab = (typeof TABS)[number];
export const GROUPINGS = ["op", "line", "file", "layer", "scope", "category", "pass", "module", "kernel"] as const;
export const ARRAYS = ["buffer", "line", "layer", "kind"] as const;
export const COLLECTIVES = ["op", "kind", "axis", "line", "layer"] as const;
export const DIFFS = ["line", "op", "layer", "module", "category"] as const;
export const SHOWN = ["all", "slower", "faster", "appeared", "disappeared", "changed"] as const;
export const DEPTHS = ["1", "2", "3", "4"] as const;
export const LANES = ["operations", "thread", "stacks"] as const;
export const POINTS = ["op", "line"] as const;
export type Range = readonly [number, number];

export interface View {
  readonly window: Range | null; // visible times; null: everything, or the selection
  readonly selection: Range | null;
  readonly device: string; // a group of lanes; "" for all
  readonly step: string; // number of a step, which is then the selection
  readonly where: Readonly<Partial<Record<Field, string>>>;
  readonly query: string;
  readonly event: number | null;
  readonly tab: Tab;
  readonly of: (typeof LANES)[number]; // whose times are summed
  readonly by: (typeof GROUPINGS)[number];
  readonly source: string; // open file, with ":line" to scroll to
  readonly flame: "scope" | "stack";
  readonly wide: "before" | "after"; // side of a comparison that gives the flame view its widths
  readonly points: (typeof POINTS)[number]; // of the roofline
  readonly program: string; // whose memory is shown; "" for the one with the most time
  readonly arrays: (typeof ARRAYS)[number]; // grouping of a program's memory
  readonly collectives: (typeof COLLECTIVES)[number]; // grouping of collectives
  readonly changes: (typeof DIFFS)[number]; // grouping of a comparison
  readonly shown: (typeof SHOWN)[number]; // rows of a comparison
  readonly node: string; // instruction of the graph, as "program: name"; "" for the chosen event's
  readonly depth: (typeof DEPTHS)[number]; // of the graph
  readonly section: string; // analysis of the tab "more"; "" for the first
  readonly sort: string; // column of the tab's table, "-" before it sorts from the largest; "" for the table's own
  readonly rows: string; // filter of the tab's table
}

export const EMPTY: View = {
  window: null,
  selection: null,
  device: "",
  step: "",
  where: {},
  query: "",
  event: null,
  tab: "ops",
  of: "operations",
  by: "op",
  source: "",
  flame: "scope",
  wide: "after",
  points: "op",
  program: "",
  arrays: "buffer",
  collectives: "op",
  changes: "line",
  shown: "all",
  node: "",
  depth: "2",
  section: "",
  sort: "",
  rows: "",
};

/** Reads an address; null for one that is not of a view, such as a section's. */
export function parseView(hash: string): View | null {
  const text = hash.replace(/^#/, "");
  if (!text.includes("=")) return null;
  const found = new URLSearchParams(text);
  const one = <T extends string>(name: string, known: readonly T[], otherwise: T): T =>
    known.find((each) => each === found.get(name)) ?? otherwise;
  const where: Partial<Record<Field, string>> = {};
  for (const field of FIELDS) {
    const value = found.get(field);
    if (value !== null) where[field] = value;
  }
  const event = found.get("event");
  return {
    window: parseRange(found.get("t")),
    selection: parseRange(found.get("s")),
    device: found.get("device") ?? "",
    step: found.get("step") ?? "",
    where,
    query: found.get("q") ?? "",
    event: event !== null && /^\d+$/.test(event) ? Number(event) : null,
    tab: one("tab", TABS, EMPTY.tab),
    of: one("of", LANES, EMPTY.of),
    by: one("by", GROUPINGS, EMPTY.by),
    source: found.get("source") ?? "",
    flame: one("flame", ["scope", "stack"], EMPTY.flame),
    wide: one("wide", ["after", "before"], EMPTY.wide),
    points: one("points", POINTS, EMPTY.points),
    program: found.get("program") ?? "",
    arrays: one("arrays", ARRAYS, EMPTY.arrays),
    collectives: one("collectives", COLLECTIVES, EMPTY.collectives),
    changes: one("changes", DIFFS, EMPTY.changes),
    shown: one("shown", SHOWN, EMPTY.shown),
    node: found.get("node") ?? "",
    depth: one("depth", DEPTHS, EMPTY.depth),
    section: found.get("section") ?? "",
    sort: found.get("sort") ?? "",
    rows: found.get("rows") ?? "",
  };
}

function parseRange(text: string | null): Range | null {
  const match = /^(-?\d+)-(-?\d+)$/.exec(text ?? "");
  const range = match && ([Number(match[1]), Number(match[2])] as const);
  return range && range[1] > range[0] ? range : null;
}

export function formatView(view: View): string {
  const parts: [string, string][] = [];
  const add = (name: string, value: string, otherwise = "") => value !== otherwise && parts.push([name, value]);
  const range = (each: Range | null) => (each ? `${Math.floor(each[0])}-${Math.ceil(each[1])}` : "");
  add("t", range(view.window));
  if (!view.step) add("s", range(view.selection));
  add("device", view.device);
  add("step", view.step);
  for (const field of FIELDS) if (view.where[field] !== undefined) parts.push([field, view.where[field]]);
  add("q", view.query);
  if (view.event !== null) add("event", String(view.event));
  add("tab", view.tab, EMPTY.tab);
  add("of", view.of, EMPTY.of);
  add("by", view.by, EMPTY.by);
  add("source", view.source);
  add("flame", view.flame, EMPTY.flame);
  add("wide", view.wide, EMPTY.wide);
  add("points", view.points, EMPTY.points);
  add("program", view.program);
  add("arrays", view.arrays, EMPTY.arrays);
  add("collectives", view.collectives, EMPTY.collectives);
  add("changes", view.changes, EMPTY.changes);
  add("shown", view.shown, EMPTY.shown);
  add("node", view.node);
  add("depth", view.depth, EMPTY.depth);
  add("section", view.section);
  add("sort", view.sort);
  add("rows", view.rows);
  const written = (value: string) => encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%3A", ":");
  return parts.map(([name, value]) => `${name}=${written(value)}`).join("&");
}
