"""What people read of serve_vs_peers: figures, ratios within a round, and shares of what the machine could do."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from report import table

from serving.engines import ENGINES, OURS, OVER_HTTP
from serving.workload import WORKLOADS, Workload

__all__ = ["Contender", "markdown", "ratios_over"]

_FIGURES = {
    "decode_tokens_per_s": ("decode tokens/s", 1.0),
    "tokens_per_s": ("tokens/s end to end", 1.0),
    "first_token_s": ("first token, ms", 1e3),
    "last_first_token_s": ("last stream's, ms", 1e3),
    "cpu_s": ("CPU-s", 1.0),
    "peak_rss_bytes": ("peak memory, MB", 1e-6),
}
_STARTS = {
    "ready_s": ("ready, s", 1.0),
    "cpu_s": ("CPU-s until ready", 1.0),
    "resident_bytes": ("resident when ready, MB", 1e-6),
}
# Bytes of a weight, and the products that the machine's peak is of.
_WEIGHTS = {"fp32": (4, "float32"), "bf16": (2, "bfloat16"), "int8": (1, "int8"), "q4": (20 / 32, "float32")}

Runs = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Contender:
    """An engine at a precision."""

    engine: str
    precision: str

    @property
    def compared_at(self) -> str:
        named = {engine.name: engine.precisions for engine in ENGINES}
        return named.get(self.engine, {}).get(self.precision, self.precision)

    def __str__(self) -> str:
        return f"{self.engine}, {self.precision}"


def markdown(record: Mapping[str, Any]) -> str:
    machine, runs, workload = record["machine"], record["runs"], Workload(**record["workload"])
    rounds = max(run["round"] for run in runs) + 1
    lines = [
        "# Serving beside its peers",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB. "
        f"{_model(workload)}: {workload.title()}; greedy.",
        f"Medians of {rounds} rounds in which the engines took turns. Decoding is counted from when all streams have "
        "their first token. First tokens are told of the median stream, then of the last. CPU time and memory are the "
        "engine's process, of the HTTP server without its client.",
        "",
    ]
    if record["agreement"]:
        equal, total = record["agreement"]["equal"], record["agreement"]["of"]
        lines += [f"fp32: {equal} of {total} continuations are transformers' (eager), token for token.", ""]
    batches = sorted({run["batch"] for run in runs})
    for batch in batches:
        here = [run for run in runs if run["batch"] == batch]
        lines += [f"## {batch} at once", "", *_figures(here, batch, record), "", *_ratios(here), ""]
    if record.get("starts"):
        lines += ["## Start", "", *_starts(record["starts"]), ""]
    versions = record["versions"].items()
    lines += [f"- {name}: " + ", ".join(f"{key} {value}" for key, value in each.items()) for name, each in versions]
    return "\n".join(lines) + "\n"


def _model(workload: Workload) -> str:
    return "SmolLM2-135M-Instruct" if workload == WORKLOADS["smollm2"] else "Llama with random weights"


def _starts(starts: Runs) -> list[str]:
    """Medians of the starts of each contender; caches of compiled programs are filled by an earlier start."""
    rows = []
    for contender in _contenders(starts):
        own = [start for start in starts if Contender(start["engine"], start["precision"]) == contender]
        medians = {figure: statistics.median(start[figure] for start in own) for figure in _STARTS}
        rows.append([str(contender), *(f"{scale * medians[figure]:.3g}" for figure, (_, scale) in _STARTS.items())])
    return table(["", *(heading for heading, _ in _STARTS.values())], rows)


def ratios_over(runs: Runs, theirs: str) -> Iterable[str]:
    """Lines that say, for each precision and batch, how this repository's engine compares with another, by rounds."""
    for precision, batch in dict.fromkeys((run["precision"], run["batch"]) for run in runs if run["engine"] == theirs):
        here = [run for run in runs if run["batch"] == batch]
        for figure, (heading, _) in _FIGURES.items():
            ours, others = (_series(here, Contender(engine, precision), figure) for engine in (OURS.name, theirs))
            ratios = [ours[number] / others[number] for number in ours.keys() & others.keys()]
            if ratios:
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                yield f"{OURS.name} over {theirs}, {precision}, {batch} at once, {heading}: {spread}"


def _contenders(runs: Runs) -> list[Contender]:
    return list(dict.fromkeys(Contender(run["engine"], run["precision"]) for run in runs))


def _series(runs: Runs, contender: Contender, figure: str) -> dict[int, float]:
    """Values by round."""
    own = (run for run in runs if Contender(run["engine"], run["precision"]) == contender)
    return {run["round"]: run[figure] for run in own}


def _figures(runs: Runs, batch: int, record: Mapping[str, Any]) -> list[str]:
    headings = ["", *(heading for heading, _ in _FIGURES.values()), "of the roofline"]
    rows = []
    for contender in _contenders(runs):
        medians = {figure: statistics.median(_series(runs, contender, figure).values()) for figure in _FIGURES}
        cells = [f"{scale * medians[figure]:.3g}" for figure, (_, scale) in _FIGURES.items()]
        rows.append([str(contender), *cells, _roofline(medians["decode_tokens_per_s"], contender, batch, record)])
    return table(headings, rows)


def _roofline(decode_tokens_per_s: float, contender: Contender, batch: int, record: Mapping[str, Any]) -> str:
    """The shortest time of a step over that which it took: reading all weights, or the products of all rows."""
    workload, peaks = Workload(**record["workload"]), record["peaks"]
    weight_bytes, dtype = _WEIGHTS[contender.compared_at]
    reading_s = workload.token_flops / 2 * weight_bytes / peaks["hbm_bandwidth_bytes_s"]
    products_s = batch * workload.token_flops / peaks["peak_flops"][dtype]
    share = max(reading_s, products_s) * decode_tokens_per_s / batch
    return f"{share:.0%} of {'bandwidth' if reading_s > products_s else f'{dtype} products'}"


def _ratios(runs: Runs) -> list[str]:
    """Of ours over each peer at the same precision, and over whichever was best in its round."""
    rows = []
    for ours in (contender for contender in _contenders(runs) if contender.engine in (OURS.name, OVER_HTTP.name)):
        same = [each for each in _contenders(runs) if each.compared_at == ours.compared_at and each != ours]
        peers = [each for each in same if each.engine not in (OURS.name, OVER_HTTP.name)]
        bare = [each for each in same if each == Contender(OURS.name, ours.precision) and ours.engine != OURS.name]
        rows += [[f"{ours} over {other.engine}", *_row(runs, ours, [other])] for other in (*bare, *peers)]
        rows += [[f"**{ours} over the best peer**", *_row(runs, ours, peers)]] if len(peers) > 1 else []
    headings = ["median of ratios (least to most)", *(heading for heading, _ in _FIGURES.values())]
    return table(headings, rows) if rows else []


def _row(runs: Runs, ours: Contender, others: list[Contender]) -> Iterable[str]:
    for figure in _FIGURES:
        best = max if figure.endswith("per_s") else min
        series = [_series(runs, other, figure) for other in others]
        own = _series(runs, ours, figure)
        ratios = [own[number] / best(each[number] for each in series) for number in own]
        yield f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
