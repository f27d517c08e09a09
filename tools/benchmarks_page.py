"""Writes docs/benchmarks.md from the tables in benchmarks/results; no number on that page is typed by hand.

python tools/benchmarks_page.py            # after a benchmark, or by `nox -s bench-peers`
python tools/benchmarks_page.py --check    # fails if the page differs, except for commits
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
COMMIT = re.compile(r"`[0-9a-f]{7,40}`")


@dataclass(frozen=True)
class Ratio:
    """A cell of a table of results.

    Attributes:
      measure: quantity that is compared, with "more" or "less" is better.
      file: file of results, without its suffix.
      row, column: first cell of the row, and head of the column.
      section: heading above the table; "" takes the first table with the row.
    """

    measure: str
    file: str
    row: str
    column: str
    section: str = ""


TRAIN, SERVE, INFER = "train_vs_peers-{}-jax0.10.2", "serve_vs_peers", "infer_vs_peers"
PUBLISHED = "serve_vs_peers-smollm2"
QWIX, XPROF = "quant_vs_qwix", "profile_conversion"
SMALL = "small model, 1.63 MB of weights, "
PEERS = {
    "Training a Llama of 66M parameters": [
        Ratio("tokens/s in float32 over MaxText", TRAIN.format("float32"), "over MaxText", "tokens/s"),
        Ratio("tokens/s in float32 over PyTorch", TRAIN.format("float32"), "over PyTorch", "tokens/s"),
        Ratio("tokens/s in bfloat16 over MaxText", TRAIN.format("bfloat16"), "over MaxText", "tokens/s"),
        Ratio("tokens/s in bfloat16 over PyTorch", TRAIN.format("bfloat16"), "over PyTorch", "tokens/s"),
        Ratio("peak memory in float32 over MaxText", TRAIN.format("float32"), "over MaxText", "peak memory, GB"),
        Ratio(
            "seconds to the first step in float32 over PyTorch",
            TRAIN.format("float32"),
            "over PyTorch",
            "s to the first step's end",
        ),
    ],
    "Serving a Llama": [
        *[
            Ratio(f"decode tokens/s, {dtype}, {count}, over the best peer", SERVE,
                  f"stack, {dtype} over the best peer", "decode tokens/s", count)
            for count in ("1 at once", "8 at once", "32 at once")
            for dtype in ("bf16", "fp32")
        ],
        Ratio("peak memory, bf16, 1 at once, over llama.cpp", SERVE, "stack, bf16 over llama.cpp", "peak memory, MB"),
    ],
    "Serving SmolLM2-135M-Instruct": [
        Ratio(f"decode tokens/s, {dtype}, {count}, over {peer}", PUBLISHED, f"stack, {dtype} over {peer}",
              "decode tokens/s", count)
        for dtype, peers in (("bf16", ("vLLM", "llama.cpp")), ("fp32", ("vLLM", "llama.cpp")), ("q4", ("llama.cpp",)))
        for count in ("1 at once", "8 at once", "32 at once")
        for peer in peers
        if (dtype, count) != ("bf16", "32 at once")
    ],
    "Speculative decoding over the same engine without it": [
        Ratio(f"tokens/s, {drafts}, {requests}", "speculation", f"{drafts}, {requests}", "ratio (least to most)")
        for drafts in ("prompt lookup, SmolLM2 in Q4_1", "SmolLM2 in float32 drafted by its Q4_1 file",
                       "small GLM's multi-token layer")
        for requests in ("code edits", "stories")
        if (drafts, requests) != ("small GLM's multi-token layer", "stories")  # had no drafts
    ],
    "Serving small models by single rows": [
        Ratio(f"requests/s, {count}, {ours} over {peer}", INFER, f"stack, {ours} over {peer}", "requests/s",
              SMALL + count)
        for count in ("1 at once", "64 at once")
        for ours, peer in (("JSON", "LitServe, JSON"), ("JSON", "FastAPI, JSON"), ("binary", "FastAPI, binary"))
    ],
    "Quantized products": [
        Ratio(f"time of two MLP blocks in {scheme}, {rows}, over Qwix", QWIX, scheme, "stack / qwix",
              f"512-2048, float32, {rows}")
        for rows in ("1 rows", "8 rows", "512 rows")
        for scheme in ("w8a8", "w4 t128", "nf4 t128")
    ],
    "Post-training of a Llama of 1M parameters": [
        Ratio(f"time over {peer}: {row}", "rl_vs_peers", row, f"stack over {peer}")
        for peer in ("Tunix", "TRL")
        for row in ("supervised step, 8 x 128 tokens, wall", "GRPO step, 4 x 4, wall", "sampling, 8 x 32 tokens, wall",
                    "sampling, 8 x 32 tokens, CPU", "sampling, 64 x 32 tokens, wall")
    ],
    "Sampling and training of small denoisers": [
        Ratio(f"{measure} over diffusers: {row}", "diffusion_vs_peers", f"{row}, {key}", "stack over diffusers")
        for measure, key in (("time", "wall, ms"), ("peak memory", "memory, MB"))
        for work in ("6 steps of sampling, 2 x 2 rows", "training step, 2 rows")
        for row in (f"{model}, {work}" for model in ("unet", "dit", "wan"))
    ],
    "Reading a profile of 101 MB": [
        Ratio("seconds for the timeline over XProf", XPROF, "timeline, ratio", "s"),
        Ratio("peak memory for the timeline over XProf", XPROF, "timeline, ratio", "peak memory, GB"),
        Ratio("seconds for the operations over XProf", XPROF, "operations, ratio", "s"),
    ],
}  # fmt: skip
INTRODUCTION = """# Benchmarks

Ratios of this stack to its peers, measured in turn on one machine: the median over rounds, in brackets the least
and the most. For rates, above 1 is better; for times and memory, below 1. `nox -s bench-peers` installs the peers,
measures, and writes this page from `benchmarks/results`, which also has the absolute values. All are of CPUs with two
cores."""
# Shown as one block of commands, which `integration_tests/test_readmes.py` parses.
ALONE = {
    "stack plugins": "models, kernels, objectives and formats as pip packages for all of these jobs",
    "stack init grpo": "one trainer and config for text, chats, preferences, rewards and images",
    "stack config show llm.yaml": "all values of a config, each with the place that it came from",
    "stack bench compile --chips v6e,h100": "each kernel through the compilers of chips that are not there",
    "stack quantize runs/mine --recipe w4a8 --out runs/w4a8": "a reason for each parameter and product left in float",
    "stack profile diff runs/a/profile runs/b/profile": "which layers and lines became slower, with a gate for CI",
}


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        if COMMIT.sub("", text) != COMMIT.sub("", PAGE.read_text(encoding="utf-8")):
            raise SystemExit("docs/benchmarks.md is not what the results say; run python tools/benchmarks_page.py.")
        return
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """Returns the page."""
    lines = [INTRODUCTION]
    for title, ratios in PEERS.items():
        lines += ["", f"## {title}", "", "| ratio | median (least to most) |", "|---|---|"]
        lines += [f"| {each.measure} | {cell(each)} |" for each in ratios]
        for file in dict.fromkeys(each.file for each in ratios):
            lines += ["", source(file)]
    lines += ["", "## Without a counterpart", "", "We found these in none of the projects above:", ""]
    lines += [f"    {command:{max(map(len, ALONE))}}  # {what}" for command, what in ALONE.items()]
    return "\n".join([*lines, ""])


def cell(ratio: Ratio) -> str:
    """Returns the cell of a table of results.

    Raises:
      SystemExit: the results have no such cell.
    """
    text = (RESULTS / f"{ratio.file}.md").read_text(encoding="utf-8")
    if ratio.section:
        _, _, text = text.partition(f"\n## {ratio.section}\n")
        text = text.partition("\n## ")[0]
    heads: list[str] = []
    before: list[str] = []
    for line in text.splitlines():
        cells = [each.strip(" *") for each in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and set(line) <= set("| -:"):
            heads = before
        elif heads and cells and cells[0] == ratio.row and ratio.column in heads:
            return re.sub(r"(?<=\d) to (?=\d)", "\N{EN DASH}", cells[heads.index(ratio.column)])
        before = cells
    raise SystemExit(f"benchmarks/results/{ratio.file}.md has no row {ratio.row!r} with {ratio.column!r}.")


def source(file: str) -> str:
    """Returns the line with command, date, machine, versions and commit of a file of results."""
    found = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    first: dict[str, Any] = found if "date" in found else next(iter(found.values()))
    machine, command = first["machine"], file.partition("-")[0]
    options = " --dtype bfloat16" if "bfloat16" in file else " --workload smollm2" if "smollm2" in file else ""
    git = ["git", "log", "-1", "--format=%h", "--", f"benchmarks/results/{file}.json"]
    commit = subprocess.run(git, check=False, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip()
    versions = first["versions"]
    each = versions if all(isinstance(value, dict) for value in versions.values()) else {"": versions}
    named = dict.fromkeys(f"{name} {version}" for group in each.values() for name, version in group.items())
    return (
        f"`nox -s bench -- {command}{options}`, {first['date']}, {machine['cpus']} CPUs of {machine['cpu']}, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB; {', '.join(named)}; results of commit `{commit}`."
    )


if __name__ == "__main__":
    main()
