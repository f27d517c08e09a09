"""Continues the same prompts with this repository, transformers, vLLM and llama.cpp in turn, and compares them.

    nox -s bench -- serve_vs_peers
    nox -s bench -- serve_vs_peers --workload smollm2                # a published model
    nox -s bench -- serve_vs_peers --engines stack --before main     # what a change costs

Speed drifts on a shared machine, so the engines take turns, each in a separate process with a random Llama, or with
SmolLM2-135M-Instruct, and ratios are formed within a round. Writes `results/serve_vs_peers.md` and `.json`; precisions
that are not measured again stay in them. `--before COMMIT` adds an engine: this repository's at that commit, built in a
separate environment. The ratios over it are printed, and saved in a record that names the commit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import before
from peers.libraries import versions_of
from report import RESULTS, circumstances, write
from serving.engines import ENGINES, OURS, REFERENCE, Engine, Places, engine_of
from serving.summary import Contender, markdown, ratios_over
from serving.worker import Worker
from serving.workload import WORKLOADS, Workload

_WARM_UP_SEED = 1_000_000
_WARM_UPS = 2  # PyTorch compiles at the second call what it took for constant at the first


def main() -> None:
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    workload = WORKLOADS[options.workload]
    engines = [engine for engine in ENGINES if engine.name in options.engines]
    name = "serve_vs_peers" if options.workload == "random" else f"serve_vs_peers-{options.workload}"
    if options.before is not None:
        engines.append(engine_of(options.before))
        name = f"{name}-before-{options.before[:12]}"
    models = options.models if options.workload == "random" else options.models / options.workload
    places = Places(options.environments.resolve(), models.resolve())
    record = _record(options.results / f"{name}.json", workload)
    for compared in options.precisions:
        contenders = [
            Contender(engine.name, precision)
            for engine in engines
            for precision, at in engine.precisions.items()
            if at == compared
        ]
        known = {key: _without(record.get(key, []), compared) for key in ("runs", "starts")}
        record |= circumstances() | known | {"peaks": _peaks()}
        if compared == "fp32":
            record["agreement"] = None
        measured(contenders, engines, places, workload, options, record)
        write(options.results, name, record, markdown(record))
    if options.before is not None:
        print("\n".join(ratios_over(record["runs"], engines[-1].name)))


def _record(path: Path, workload: Workload) -> dict[str, Any]:
    """What was measured before, of the same workload, or nothing."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("workload") == asdict(workload):
        return record
    return {"workload": asdict(workload), "versions": {}, "runs": [], "starts": [], "agreement": None}


def _without(runs: Sequence[dict[str, Any]], precision: str) -> list[dict[str, Any]]:
    return [run for run in runs if Contender(run["engine"], run["precision"]).compared_at != precision]


def measured(
    contenders: Sequence[Contender],
    engines: Sequence[Engine],
    places: Places,
    workload: Workload,
    options: argparse.Namespace,
    record: Any,
) -> None:
    """Appends the runs of all rounds at one precision to the record."""
    known = {engine.name: engine for engine in engines}
    with ExitStack() as stack:
        workers: dict[Contender, Worker] = {}
        for contender in contenders:
            print(f"starting {contender}", file=sys.stderr, flush=True)
            engine = known[contender.engine]
            command = engine.command(places, workload, contender.precision)
            if options.workload != "random":
                command += ["--workload", options.workload]
            log = places.models / f"{contender.engine}-{contender.precision}.log"
            record["versions"][engine.name] = versions_of(command[0], engine.packages)
            workers[contender], starts = _started(command, log, options.starts)
            record["starts"] += [asdict(contender) | start for start in starts]
            stack.callback(workers[contender].close)
            for batch in sorted(options.batches, reverse=True):
                for _ in range(_WARM_UPS):
                    workers[contender].ask(workload=workload, batch=batch, seed=_WARM_UP_SEED)
        for batch in options.batches:
            for number in range(options.rounds):
                answers = one_round(workers, workload, batch=batch, number=number)
                _compare_tokens(answers, record)
                for contender, answer in answers.items():
                    run = {**asdict(contender), "batch": batch, "round": number, **answer}
                    record["runs"].append({name: value for name, value in run.items() if name != "tokens"})
                    print(json.dumps(record["runs"][-1]), flush=True)


def _started(command: Sequence[str | Path], log: Path, starts: int) -> tuple[Worker, list[dict[str, float]]]:
    """Starts a worker `1 + starts` times; returns the last one, and what all starts but the first one took.

    The first start fills the caches of compiled programs and of the system.
    """
    figures: list[dict[str, float]] = []
    worker = Worker(command, log, {"JAX_PLATFORMS": "cpu"})
    for _ in range(starts):
        worker.close()
        worker = Worker(command, log, {"JAX_PLATFORMS": "cpu"})
        figures.append(worker.start)
    return worker, figures


def one_round(
    workers: dict[Contender, Worker], workload: Workload, *, batch: int, number: int
) -> dict[Contender, dict[str, Any]]:
    """One turn of each engine, in another order each time."""
    order = list(workers)
    order = order[number % len(order) :] + order[: number % len(order)]
    return {contender: workers[contender].ask(workload=workload, batch=batch, seed=number) for contender in order}


def _compare_tokens(answers: dict[Contender, dict[str, Any]], record: dict[str, Any]) -> None:
    """Counts continuations of ours in fp32 that are the reference's, token for token."""
    ours, theirs = answers.get(Contender(OURS.name, "fp32")), answers.get(Contender(REFERENCE.name, "fp32"))
    if ours is None or theirs is None:
        return
    equal = sum(mine == other for mine, other in zip(ours["tokens"], theirs["tokens"], strict=True))
    known = record["agreement"] or {"equal": 0, "of": 0}
    record["agreement"] = {"equal": known["equal"] + equal, "of": known["of"] + len(ours["tokens"])}


def _peaks() -> dict[str, Any]:
    """This CPU's measured bandwidth and products; measured by core in a process that ends before anything else runs."""
    program = (
        "import dataclasses, json; from stack_core.chips import current_chip;"
        "print(json.dumps(dataclasses.asdict(current_chip())))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return json.loads(found.stdout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engines", nargs="*", choices=names, default=names)
    parser.add_argument("--before", type=before.full_commit, help="a commit of this repository, as one more engine")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="random")
    parser.add_argument("--precisions", nargs="*", choices=("fp32", "bf16", "int8", "q4"), help="by default all")
    parser.add_argument("--batches", nargs="*", type=int, choices=(1, 8, 32), default=(1, 8, 32))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="measured starts of each engine")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack")
    parser.add_argument("--environments", type=Path, default=cache / "bench-envs", help="where peers are installed")
    parser.add_argument("--models", type=Path, default=cache / "bench-models", help="where models are written")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.precisions is None:
        options.precisions = ["fp32", "bf16", "int8", *(["q4"] if options.workload == "smollm2" else [])]
    elif "q4" in options.precisions and options.workload != "smollm2":
        parser.error("--precisions q4 needs --workload smollm2, which is published with weights of four bits")
    return options


if __name__ == "__main__":
    main()
