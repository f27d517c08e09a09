"""Trains the same Llama with this repository, MaxText and PyTorch in turn, and compares them.

    nox -s bench -- train_vs_peers
    nox -s bench -- train_vs_peers --peers --before main     # what a change costs

Speed drifts on a shared machine, so the trainers take turns: each round starts every one of them once, in a fresh
process, and ratios are formed within a round. The share of the matmul peak is what the model's products must do over
what the cores do in large products of XLA's, as `stack chips` shows. Writes
`results/train_vs_peers-DTYPE-jaxVERSION.md` and `.json`, the version being that of the environment it runs in.
`--before COMMIT` adds a peer: this repository at that commit, built in a separate environment. The ratios over it are
printed, and saved in a record that names the commit.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import before, maxtext, pytorch, stack_train
from peers.libraries import versions_of
from peers.measure import measure
from peers.peer import Peer, Workload
from report import RESULTS, circumstances, table, write

from stack_core.chips import current_chip

OURS = stack_train.PEER
PEERS = {
    "stack": OURS,
    "without_kernels": stack_train.WITHOUT_KERNELS,
    "maxtext": maxtext.PEER,
    "pytorch": pytorch.PEER,
}
COLUMNS = {
    "tokens_per_s": ("tokens/s", 1.0),
    "step_s": ("s a step", 1.0),
    "step_cpu_s": ("CPU-s a step", 1.0),
    "first_step_s": ("s to the first step's end", 1.0),
    "first_step_cpu_s": ("CPU-s to the first step's end", 1.0),
    "startup_cpu_s": ("of these before the step", 1.0),
    "peak_rss_bytes": ("peak memory, GB", 1e-9),
}

Runs = Mapping[str, Sequence[Mapping[str, float]]]


def main() -> None:
    arguments = _arguments()
    workload = Workload(dtype=arguments.dtype)
    chosen = [PEERS[name] for name in dict.fromkeys(("stack", *arguments.peers))]
    if arguments.before is not None:
        chosen.append(before.peer_of(arguments.before))
    pythons = {peer.name: _installed(peer, workload, arguments.environments) for peer in chosen}
    runs: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in chosen}
    for round_number in range(1, arguments.rounds + 1):
        for peer in chosen:
            command = peer.command(pythons[peer.name], workload, arguments.steps)
            with tempfile.TemporaryDirectory() as folder:
                run = measure(command, steps=arguments.steps, folder=Path(folder))
            figures = run.figures(warmup_steps=arguments.warmup_steps, step_tokens=workload.step_tokens)
            runs[peer.name].append(figures)
            print(json.dumps({"round": round_number, "peer": peer.name, **figures}), flush=True)
    record = {
        **circumstances(),
        "workload": asdict(workload),
        "matmul_flops_s": current_chip().peak_flops[workload.dtype],
        "steps": arguments.steps,
        "warmup_steps": arguments.warmup_steps,
        "versions": {peer.name: versions_of(pythons[peer.name], peer.packages) for peer in chosen},
        "runs": runs,
    }
    name = f"train_vs_peers-{workload.dtype}-jax{record['versions'][OURS.name]['jax']}"
    if arguments.before is not None:
        theirs = before.name_of(arguments.before)
        for key, (heading, _) in COLUMNS.items():
            print(f"{OURS.name} over {theirs}, {heading}: {_ratio(runs[OURS.name], runs[theirs], key)}")
        name = f"{name}-before-{arguments.before[:12]}"
    write(arguments.results, name, record, _markdown(record))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = [name for name in PEERS if PEERS[name] is not OURS]
    parser.add_argument("--peers", nargs="*", choices=others, default=others)
    parser.add_argument("--before", type=before.full_commit, help="a commit of this repository, as one more peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of each run, the warm-up among them")
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where the peers are installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not 1 <= arguments.warmup_steps < arguments.steps:
        parser.error("--warmup-steps must be at least 1 and less than --steps")
    return arguments


def _installed(peer: Peer, workload: Workload, environments: Path) -> Path:
    print(f"installing {peer.name}", file=sys.stderr, flush=True)
    folder = environments.resolve() / peer.name.lower()
    folder.mkdir(parents=True, exist_ok=True)
    return peer.install(folder, workload)


def _markdown(record: Mapping[str, Any]) -> str:
    machine, workload, runs = record["machine"], record["workload"], record["runs"]
    sizes = ", ".join(f"{name} {value}" for name, value in workload.items())
    rounds = len(runs[OURS.name])
    lines = [
        f"# Training beside its peers, {workload['dtype']}",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB. "
        f"Llama: {sizes}.",
        f"Medians of {rounds} rounds of {record['steps']} steps, {record['warmup_steps']} of them warm-up.",
        "",
        *table(
            ["", *(heading for heading, _ in COLUMNS.values()), "share of the matmul peak"],
            [[*_row(name, runs[name]), _share_of_peak(record, name)] for name in runs],
        ),
        "",
        f"The matmul peak is {record['matmul_flops_s'] / 1e9:.0f} GFLOP/s.",
        "",
        f"{OURS.name} over each peer, ratios within a round: median (least to most).",
        "",
        *table(["", *(heading for heading, _ in COLUMNS.values())], _ratio_rows(runs)),
        "",
        *(
            f"- {name}: " + ", ".join(f"{package} {version}" for package, version in versions.items())
            for name, versions in record["versions"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, runs: Sequence[Mapping[str, float]]) -> list[str]:
    medians = {key: statistics.median(run[key] for run in runs) for key in COLUMNS}
    return [name, *(f"{scale * medians[key]:.3g}" for key, (_, scale) in COLUMNS.items())]


def _share_of_peak(record: Mapping[str, Any], name: str) -> str:
    tokens_per_s = statistics.median(run["tokens_per_s"] for run in record["runs"][name])
    return f"{Workload(**record['workload']).token_flops * tokens_per_s / record['matmul_flops_s']:.0%}"


def _ratio_rows(runs: Runs) -> list[list[str]]:
    return [
        [f"over {name}", *(_ratio(runs[OURS.name], theirs, key) for key in COLUMNS)]
        for name, theirs in runs.items()
        if name != OURS.name
    ]


def _ratio(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], key: str) -> str:
    ratios = [our[key] / their[key] for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
