// Numbers as `stack_core.report.fields.number` formats them.

/** Three significant digits, as Python's ".3g". */
export function general(value: number): string {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  const exponent = Math.floor(Math.log10(Math.abs(rounded)));
  if (exponent >= -4 && exponent < 3) return String(rounded);
  const [digits, power] = rounded.toExponential().split("e") as [string, string];
  return `${digits}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

function scaled(value: number, base: number, units: readonly string[]): string {
  let unit = 0;
  let left = value;
  while (Math.abs(left) >= base && unit + 1 < units.length) [left, unit] = [left / base, unit + 1];
  return `${left < 1000 ? general(left) : left.toFixed(0)} ${units[unit]}`.trim();
}

export const count = (value: number): string => value.toLocaleString("en-US");
export const bytes = (value: number): string => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const flops = (value: number): string => scaled(value, 1000, ["", "k", "M", "G", "T", "P", "E"]);

export function seconds(value: number): string {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]] as const) {
    if (Math.abs(value) >= scale) return value < 1000 ? `${general(value / scale)} ${unit}` : `${count(Math.round(value))} s`;
  }
  return value === 0 ? "0" : `${general(value / 1e-9)} ns`;
}

export function share(value: number): string {
  if (value === 0 || Math.abs(value) >= 0.001) return `${(100 * value).toFixed(1)}%`;
  return `${Number((100 * value).toPrecision(2))}%`;
}

export const picoseconds = (value: number): string => seconds(value * 1e-12);
