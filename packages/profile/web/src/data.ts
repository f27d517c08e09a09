// The capture that the page embeds: events in typed arrays, and the tables that they refer to.

export interface Kind {
  readonly type: "step" | "operation" | "host" | "collective" | "compile" | "input" | "work" | "sample" | "gc";
  readonly name: string;
  readonly module?: string;
  readonly category?: string;
  readonly kernel?: string; // of a GPU's operation, unless it has the operation's name
  readonly layer?: string;
  readonly scope?: string;
  readonly pass?: string;
  readonly line?: string;
  readonly file?: string;
  readonly package_line?: string;
  readonly opcode?: string;
  readonly op_name?: string;
  readonly origin?: string;
  readonly stack?: number;
  readonly outer?: number;
  readonly contains?: boolean; // of an operation: it runs others, as loops do, or is of no program
  readonly flops?: number | null;
  readonly bytes?: number;
  readonly ideal?: number; // seconds of one execution at the chip's peaks
  readonly bound?: string;
  readonly collective?: string; // "all-reduce", ...
  readonly axis?: string;
  readonly array_bytes?: number | null;
  readonly sent_bytes?: number | null;
  readonly detail?: string; // of an input stage
  readonly changes?: readonly string[]; // of a comparison: labels of its rows, by grouping
  readonly pair?: string; // of a step of a comparison: the step before
  readonly calling?: boolean; // of an input stage: on the thread that calls JAX
}

export interface Frame {
  readonly file: string;
  readonly line: number;
  readonly function: string;
  readonly isUsers: boolean;
}

export interface Source {
  readonly lines: readonly string[] | null;
  readonly note: string;
}

export interface Lane {
  readonly index: number;
  readonly group: string;
  readonly name: string;
  readonly type: "steps" | "operations" | "thread" | "stacks" | "gc" | "collectives" | "compile" | "input" | "work";
  readonly rows: number;
  readonly side: number; // of a comparison: 0 before, 1 after; otherwise 0
  readonly first: number; // of its events
  readonly limit: number; // after its last event
}

/** One device's part of the chip's peaks. */
export interface Roof {
  readonly chip: string | null;
  readonly note: string;
  readonly flops_s: Readonly<Record<string, number>>; // by dtype
  readonly bytes_s: number | null;
}

export interface ProgramMemory {
  readonly program: string;
  readonly facts: Readonly<Record<string, number | string | null>>;
  readonly notes: readonly string[];
  readonly rows: readonly (readonly [name: string, kind: string, size: number, layer: string, line: string])[];
  readonly moments: readonly (readonly [position: number, instruction: string, live: number, line: string])[];
  readonly peak_at: number; // index of the moment; -1 without any
}

export interface Allocator {
  readonly device: string;
  readonly name: string;
  readonly time: Float64Array;
  readonly allocated: Float64Array;
  readonly available: Float64Array;
  readonly peak: Float64Array;
}

/** Instructions of a program: the index of a fusion for those inside of it, otherwise -1, and the indices of operands and users. */
export interface Program {
  readonly program: string;
  readonly nodes: readonly (readonly [
    name: string,
    opcode: string,
    shape: string,
    size: number,
    flops: number | null,
    traffic: number | null,
    line: string,
    fusion: number,
    operands: readonly number[],
    users: readonly number[],
  ])[];
}

export interface Compile {
  readonly rows: readonly (readonly [name: string, programs: number, why: string, isKnown: boolean])[];
  readonly notes: readonly string[];
}

export interface Communication {
  readonly link_bytes_s: number | null;
  readonly notes: readonly string[];
}

export interface Input {
  readonly processes: readonly { readonly group: string; readonly start: number; readonly end: number }[]; // of their steps
  readonly notes: readonly string[];
}

export interface Advice {
  readonly rows: readonly {
    readonly cause: string;
    readonly gain_s: number;
    readonly gain_elapsed_share: number | null;
    readonly evidence: string;
    readonly change: string;
    readonly line: string;
    readonly program: string;
    readonly event: string;
    readonly address: string | null; // of its events
  }[];
  readonly notes: readonly string[];
}

/** A row of `stack profile diff`. */
export interface Change {
  readonly name: string;
  readonly before_s: number;
  readonly after_s: number;
  readonly change_s: number;
  readonly low_s: number | null;
  readonly high_s: number | null;
  readonly change_before_share: number | null;
  readonly own_change_s: number | null;
  readonly p: number | null;
  readonly verdict: string;
  readonly matched: string;
  readonly category: string;
  readonly layer: string;
  readonly package_line: string;
  readonly label: string; // of its events; "" without any
  readonly places: readonly [string, string]; // lines of the heaviest operation before and after
}

export interface Changes {
  readonly tables: Readonly<Record<string, readonly Change[]>>; // by grouping
  readonly notes: readonly string[];
  readonly step: string; // the typical one
}

/** All times are in picoseconds since the start of the trace; event `i` is element `i` of each column. */
export interface Capture {
  readonly lanes: readonly Lane[];
  readonly kinds: readonly Kind[];
  readonly frames: readonly Frame[];
  readonly stacks: readonly (readonly number[])[];
  readonly sources: ReadonlyMap<string, Source>;
  readonly leftOut: number;
  readonly roof: Roof | null;
  readonly memory: readonly ProgramMemory[];
  readonly allocators: readonly Allocator[];
  readonly graphs: readonly Program[];
  readonly compile: Compile | null;
  readonly communication: Communication | null;
  readonly input: Input | null;
  readonly advice: Advice | null;
  readonly changes: Changes | null; // of a comparison
  readonly failures: Readonly<Record<string, string>>; // error messages of missing tables
  readonly dispatchedBy: Uint32Array; // 1 + the event of the host that dispatched it, or 0
  readonly arrows: Arrows;
  readonly extra: Float64Array; // a further time of events of derived lanes, -1 if unknown
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly self: Float64Array;
  readonly kind: Uint32Array;
  readonly row: Uint16Array;
  readonly reached: Float64Array; // the latest end of the lane's events up to each one, for binary search
  from: number; // `align` moves the events after
  to: number;
}

/** Pairs of an event of the host and the first event of a lane that it dispatched. */
export interface Arrows {
  readonly source: Uint32Array;
  readonly target: Uint32Array;
}

interface Packed {
  readonly length: number;
  readonly columns: readonly (readonly [string, string])[];
  readonly data: string;
}

interface Tables {
  readonly lanes: readonly { group: string; name: string; type: Lane["type"]; rows: number; count: number; side?: number }[];
  readonly kinds: readonly Kind[];
  readonly frames: readonly (readonly [string, number, string, boolean])[];
  readonly stacks: readonly (readonly number[])[];
  readonly sources: Readonly<Record<string, Source>>;
  readonly left_out: number;
  readonly roof?: Roof;
  readonly memory?: readonly ProgramMemory[];
  readonly allocators?: readonly { device: string; name: string; history: Packed }[];
  readonly graphs?: readonly Program[];
  readonly compile?: Compile;
  readonly communication?: Communication;
  readonly input?: Input;
  readonly advice?: Advice;
  readonly changes?: Changes;
  readonly failures: Readonly<Record<string, string>>;
}

export async function readCapture(text: string): Promise<Capture> {
  const { tables, events } = JSON.parse(text) as { tables: string; events: Packed };
  const found = JSON.parse(new TextDecoder().decode(await inflate(tables))) as Tables;
  const columns = await unpack(events);
  const lanes: Lane[] = [];
  let first = 0;
  for (const { count, ...lane } of found.lanes) {
    lanes.push({ side: 0, ...lane, index: lanes.length, first, limit: first + count });
    first += count;
  }
  const allocators = await Promise.all(
    (found.allocators ?? []).map(async ({ device, name, history }): Promise<Allocator> => {
      const [time, allocated, available, peak] = [...(await unpack(history)).values()] as Float64Array[];
      return { device, name, time: time!, allocated: allocated!, available: available!, peak: peak! };
    }),
  );
  const dispatchedBy = new Uint32Array(columns.get("dispatched_by")!);
  return {
    ...timed(lanes, columns),
    roof: found.roof ?? null,
    memory: found.memory ?? [],
    graphs: found.graphs ?? [],
    compile: found.compile ?? null,
    communication: found.communication ?? null,
    input: found.input ?? null,
    advice: found.advice ?? null,
    changes: found.changes ?? null,
    extra: columns.get("extra")!,
    dispatchedBy,
    arrows: firstDispatched(lanes, dispatchedBy),
    allocators,
    failures: found.failures,
    lanes,
    kinds: found.kinds,
    frames: found.frames.map(([file, line, name, isUsers]) => ({ file, line, function: name, isUsers })),
    stacks: found.stacks,
    sources: new Map(Object.entries(found.sources)),
    leftOut: found.left_out,
    kind: new Uint32Array(columns.get("kind")!),
    row: new Uint16Array(columns.get("row")!),
  };
}

/** Computes absolute times from the stored differences. */
function timed(lanes: readonly Lane[], columns: Columns) {
  const start = columns.get("start")!;
  const end = columns.get("duration")!;
  const self = columns.get("inside")!;
  const reached = new Float64Array(start.length);
  let from = Infinity;
  let to = -Infinity;
  for (const lane of lanes) {
    let now = 0;
    let latest = -Infinity;
    for (let i = lane.first; i < lane.limit; i++) {
      now += start[i]!;
      start[i] = now;
      self[i] = end[i]! - self[i]!;
      end[i] = now + end[i]!;
      latest = Math.max(latest, end[i]!);
      reached[i] = latest;
    }
    if (lane.limit > lane.first) from = Math.min(from, start[lane.first]!);
    to = Math.max(to, latest);
  }
  return { start, end, self, reached, from: from < to ? from : 0, to: from < to ? to : 1 };
}

function firstDispatched(lanes: readonly Lane[], by: Uint32Array): Arrows {
  const source: number[] = [];
  const target: number[] = [];
  const last = new Int32Array(by.length).fill(-1); // lane of the last arrow of each event
  for (const lane of lanes) {
    for (let i = lane.first; i < lane.limit; i++) {
      const event = by[i]! - 1;
      if (event < 0 || last[event] === lane.index) continue;
      last[event] = lane.index;
      source.push(event);
      target.push(i);
    }
  }
  return { source: Uint32Array.from(source), target: Uint32Array.from(target) };
}

/** The first events of each lane that an event dispatched. */
export function targetsOf({ source, target }: Arrows, event: number): readonly number[] {
  const found: number[] = [];
  for (let place = source.indexOf(event); place >= 0; place = source.indexOf(event, place + 1)) found.push(target[place]!);
  return found;
}

type Columns = ReadonlyMap<string, Float64Array>;

async function unpack(packed: Packed): Promise<Columns> {
  const bytes = await inflate(packed.data);
  const columns = new Map<string, Float64Array>();
  let place = 0;
  for (const [name, dtype] of packed.columns) {
    const width = Number(dtype.slice(1));
    columns.set(name, column(bytes.subarray(place, place + width * packed.length), packed.length, dtype));
    place += width * packed.length;
  }
  return columns;
}

/** Joins the bytes of a column, which are stored byte by byte: the lowest of every value first. */
function column(bytes: Uint8Array, length: number, dtype: string): Float64Array {
  const width = Number(dtype.slice(1));
  const joined = new Uint8Array(width * length);
  for (let byte = 0; byte < width; byte++) {
    const plane = bytes.subarray(byte * length, (byte + 1) * length);
    for (let i = 0, place = byte; i < length; i++, place += width) joined[place] = plane[i]!;
  }
  // Typed arrays are little-endian on all machines with a browser.
  if (dtype === "f8") return new Float64Array(joined.buffer);
  if (dtype === "u2") return new Float64Array(new Uint16Array(joined.buffer));
  const low = new Uint32Array(joined.buffer);
  if (dtype === "u4") return new Float64Array(low);
  const high = new Int32Array(joined.buffer);
  const values = new Float64Array(length);
  for (let i = 0; i < length; i++) values[i] = low[2 * i]! + high[2 * i + 1]! * 2 ** 32;
  return values;
}

async function inflate(text: string): Promise<Uint8Array> {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Whether a lane shows other events again, or samples, so that counts and searches leave its events out. */
export const isDerived = (lane: Lane): boolean => isSampled(lane) || lane.type === "collectives" || lane.type === "compile" || lane.type === "input" || lane.type === "work";

export const isSampled = (lane: Lane): boolean => lane.type === "stacks";

/** Index of the lane's first event that may end after `time`. */
export function firstEndingAfter(capture: Capture, lane: Lane, time: number): number {
  let low = lane.first;
  let high = lane.limit;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (capture.reached[middle]! > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

export function laneOf(capture: Capture, event: number): Lane {
  return capture.lanes.find((lane) => event < lane.limit)!;
}
