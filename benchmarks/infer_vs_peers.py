"""Asks `stack serve --repository`, FastAPI around a jitted function and LitServe in turn, and compares what it costs.

    nox -s bench -- infer_vs_peers
    nox -s bench -- infer_vs_peers --models small --clients 64 --rounds 9

Speed drifts on a shared machine, so the servers take turns, each paused while another is asked, and ratios are formed
within a round. A separate client process keeps 1, 16 or 64 connections busy with requests for one row. CPU time is the
sum over a server's processes; a shared machine changes it less than wall time. Every answer is compared with NumPy's
before anything is measured. Writes `results/infer_vs_peers.md` and `.json`; cases that are not measured again stay.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inference.models import MODELS, Perceptron
from inference.servers import CONTENDERS, SERVERS, Contender, Places, Server, logits_of
from peers.libraries import versions_of
from peers.measure import tree_usage
from report import RESULTS, circumstances, table, write

_AWAKE_S = 0.05  # for all threads to run again
_START_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FIGURES = {
    "requests_per_s": ("requests/s", 1.0),
    "p50_s": ("p50, ms", 1e3),
    "p99_s": ("p99, ms", 1e3),
    "request_cpu_s": ("CPU a request, us", 1e6),
    "cpu_per_wall": ("CPU-s a wall second", 1.0),
    "rss_bytes": ("memory, MB", 1e-6),
}
_RATIOS = ("requests_per_s", "p50_s", "p99_s", "request_cpu_s")


class Running:
    """A server, paused by a signal except while it is asked, and its client."""

    def __init__(self, server: Server, model: Perceptron, places: Places) -> None:
        port = _free_port()
        self._log = places.models / f"{server.name}-{model.name}.log"
        command = list(map(str, server.command(places, model, port)))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=places.models
            )
        client = [sys.executable, Path(__file__).parent / "inference" / "load.py", str(port)]
        self._client = subprocess.Popen(
            list(map(str, client)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            self._wait_for(port, server)
        except BaseException:  # Ctrl-C too must leave no server behind
            self.close()
            raise
        self.versions = versions_of(sys.executable if server.name == "stack" else command[0], server.packages)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the server run."""
        os.killpg(self._process.pid, signal.SIGCONT)
        time.sleep(_AWAKE_S)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def ask(self, contender: Contender, model: Perceptron, *, clients: int, seconds: float) -> dict[str, Any]:
        """The figures of one turn.

        Raises:
          RuntimeError: a request failed, or the answer is wrong.
        """
        asked = {**contender.request(model), "clients": clients, "seconds": seconds, "warm_up_s": seconds / 4}
        with self.awake():
            print(json.dumps(asked), file=self._client.stdin, flush=True)
            self._read()  # the client has warmed up
            busy_s, (cpu_s, _) = _busy_s(), tree_usage(self._process.pid)
            print(file=self._client.stdin, flush=True)
            answer = self._read()
            busy_s = _busy_s() - busy_s
            end_cpu_s, rss_bytes = tree_usage(self._process.pid)
        if answer["failed"] or not answer["requests"]:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{contender.name}: {answer['failed'][:3]}\n{tail}")
        np.testing.assert_allclose(
            logits_of(contender, answer["body"]), model.expected(model.pixels())[0], rtol=1e-3, atol=1e-3
        )
        used_s = end_cpu_s - cpu_s
        return {
            "requests_per_s": answer["requests"] / answer["wall_s"],
            "p50_s": answer["p50_s"],
            "p99_s": answer["p99_s"],
            "request_cpu_s": used_s / answer["requests"],
            "cpu_per_wall": used_s / answer["wall_s"],
            "rss_bytes": rss_bytes,
            "client_request_cpu_s": answer["client_cpu_s"] / answer["requests"],
            "others_cpu_per_wall": max(0.0, busy_s - used_s - answer["client_cpu_s"]) / answer["wall_s"],
        }

    def close(self) -> None:
        """Ends the server and the client."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._client.kill()
        self._process.wait()
        self._client.wait()

    def _read(self) -> dict[str, Any]:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"The client ended with {self._client.wait()}.")
        return json.loads(line)

    def _wait_for(self, port: int, server: Server) -> None:
        path = "v2/health/ready" if server.name == "stack" else "docs"
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5).read()
                break
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{server.name} does not start:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        os.killpg(self._process.pid, signal.SIGSTOP)


def main() -> None:
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    places = Places(options.environments.resolve(), options.models_folder.resolve())
    places.models.mkdir(parents=True, exist_ok=True)
    contenders = [contender for contender in CONTENDERS if contender.server in options.servers]
    path = options.results / "infer_vs_peers.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"versions": {}, "runs": []}
    record |= {**circumstances(), "seconds": options.seconds}
    for name in options.models:
        for clients in options.clients:
            known = [run for run in record["runs"] if (run["model"], run["clients"]) != (name, clients)]
            record["runs"] = known
            measured(MODELS[name], clients, contenders, places, options, record)
            record["load_average"] = os.getloadavg()[0]
            write(options.results, "infer_vs_peers", record, _markdown(record))


def measured(
    model: Perceptron,
    clients: int,
    contenders: Sequence[Contender],
    places: Places,
    options: argparse.Namespace,
    record: Any,
) -> None:
    """Appends the runs of all rounds with one model and so many clients to the record."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        for name in dict.fromkeys(contender.server for contender in contenders):
            print(f"starting {name}, {model.name}", file=sys.stderr, flush=True)
            running[name] = Running(SERVERS[name], model, places)
            stack.callback(running[name].close)
            record["versions"][name] = running[name].versions
        for number in range(options.rounds):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                figures = running[contender.server].ask(contender, model, clients=clients, seconds=options.seconds)
                run = {"model": model.name, "clients": clients, "round": number, "contender": contender.name}
                record["runs"].append(run | figures)
                print(json.dumps(record["runs"][-1]), flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _busy_s() -> float:
    """CPU time of everything on this machine; see proc(5)."""
    ticks = list(map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / _TICKS_PER_S


def _markdown(record: Mapping[str, Any]) -> str:
    machine, runs = record["machine"], record["runs"]
    others = _spread([run["others_cpu_per_wall"] for run in runs])
    rounds = max(run["round"] for run in runs) + 1
    lines = [
        "# Inference servers beside their peers",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB. "
        f"The load average was {record['load_average']:.1f} at the end; what else ran on the machine took {others} CPU "
        "seconds a second.",
        f"Requests for one row of 784 float32, each client with one under way; {rounds} rounds of "
        f"{record['seconds']:.3g} s in which the servers took turns. Medians, with least and most in brackets. The "
        "client shares the processors and is not counted.",
        "",
    ]
    for model, clients in dict.fromkeys((run["model"], run["clients"]) for run in runs):
        here = [run for run in runs if (run["model"], run["clients"]) == (model, clients)]
        size = f"{MODELS[model].size_bytes / 1e6:.3g} MB of weights"
        lines += [f"## {model} model, {size}, {clients} at once", "", *_figures(here), "", *_ratios(here), ""]
    versions = record["versions"].items()
    lines += [f"- {name}: " + ", ".join(f"{key} {value}" for key, value in each.items()) for name, each in versions]
    return "\n".join(lines) + "\n"


def _series(runs: Sequence[Mapping[str, Any]], contender: str, figure: str) -> dict[int, float]:
    """Values by round."""
    return {run["round"]: run[figure] for run in runs if run["contender"] == contender}


def _figures(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for contender in dict.fromkeys(run["contender"] for run in runs):
        series = [(_series(runs, contender, figure), scale) for figure, (_, scale) in _FIGURES.items()]
        rows.append([contender, *(_spread([scale * value for value in each.values()]) for each, scale in series)])
    return table(["", *(heading for heading, _ in _FIGURES.values())], sorted(rows))


def _ratios(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each of ours over each peer, within rounds."""
    names = list(dict.fromkeys(run["contender"] for run in runs))
    ours = [name for name in names if name.startswith("stack")]
    rows = []
    for own in sorted(ours):
        for other in sorted(set(names) - set(ours)):
            cells = []
            for figure in _RATIOS:
                mine, theirs = _series(runs, own, figure), _series(runs, other, figure)
                cells.append(_spread([mine[number] / theirs[number] for number in mine]))
            rows.append([f"{own} over {other}", *cells])
    return table(["ratios", *(_FIGURES[figure][0].partition(",")[0] for figure in _RATIOS)], rows) if rows else []


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--clients", nargs="*", type=int, default=(1, 16, 64))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack")
    parser.add_argument("--environments", type=Path, default=cache / "bench-envs", help="where peers are installed")
    parser.add_argument("--models-folder", type=Path, default=cache / "bench-models", help="where bundles are written")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
