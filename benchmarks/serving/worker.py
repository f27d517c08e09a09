"""A process that holds one engine: it answers lines of JSON, and is stopped by the system while others run.

Standard library only, as engines run in environments of their own.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.workload import WORKLOADS, Workload, prompts

_AWAKE_S = 0.05  # for all threads to run again

__all__ = ["Arrivals", "Generate", "Stream", "Worker", "arguments", "serve"]


@dataclass(frozen=True)
class Stream:
    """One continuation.

    Attributes:
      times_s: when each token was there, by `time.perf_counter()`.
    """

    tokens: list[int]
    times_s: list[float]


Arrivals = list[Stream]
Generate = Callable[[list[list[int]], int], Arrivals]
"""(prompts, new tokens of each) -> their continuations, greedy, all asked for at once."""


def arguments(*names: str) -> argparse.Namespace:
    """Reads the command line of a worker: the model, its workload, and `--NAME VALUE` for each of `names`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--workload", type=WORKLOADS.__getitem__, default="random")
    for name in names:
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def serve(generate: Generate, workload: Workload, *, processes: Sequence[int] = ()) -> None:
    """Answers each request on standard input, until its end.

    Args:
      generate: continues prompts.
      workload: sizes of the model and of the requests.
      processes: others that work for the engine; their CPU time and memory are counted instead of this one's.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    ready = {"cpu_s": _cpu_s(processes), "resident_bytes": _memory_bytes("VmRSS", processes)}
    print(json.dumps(ready), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        texts = prompts(workload, batch=request["batch"], seed=request["seed"])
        cpu_s, client_cpu_s = _cpu_s(processes), time.process_time()
        started_s = time.perf_counter()
        streams = generate(texts, request["new_tokens"])
        answer = {
            **_figures(streams, started_s),
            "cpu_s": _cpu_s(processes) - cpu_s,
            "client_cpu_s": time.process_time() - client_cpu_s if processes else 0.0,
            "peak_rss_bytes": _memory_bytes("VmHWM", processes),
            "tokens": [stream.tokens for stream in streams],
        }
        print(json.dumps(answer), file=answers)


def _figures(streams: Arrivals, started_s: float) -> dict[str, float]:
    """Decoding is counted from when all streams have their first token: nobody's prompt is computed any more."""
    first_s = sorted(stream.times_s[0] - started_s for stream in streams)
    decoding_s = started_s + first_s[-1]
    end_s = max(stream.times_s[-1] for stream in streams)
    decoded_tokens = sum(time_s > decoding_s for stream in streams for time_s in stream.times_s)
    tokens = sum(len(stream.tokens) for stream in streams)
    return {
        "decode_tokens_per_s": decoded_tokens / (end_s - decoding_s),
        "tokens_per_s": tokens / (end_s - started_s),
        "first_token_s": first_s[len(first_s) // 2],
        "last_first_token_s": first_s[-1],
    }


def _cpu_s(processes: Sequence[int]) -> float:
    if not processes:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(name: str, processes: Sequence[int]) -> int:
    statuses = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in processes or ["self"]]
    sizes = [line.split()[1] for lines in statuses for line in lines if line.startswith(f"{name}:")]
    return sum(int(size) * 1024 for size in sizes)


class Worker:
    """The driver's end. From its readiness on, the process and its children run only while they are asked.

    Attributes:
      start: seconds until it was ready, by the clock and of processor time, and the resident memory then.

    Raises:
      RuntimeError: it ended; its output is in `log`.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        started_s = time.perf_counter()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
                start_new_session=True,
            )
        ready = self._read()
        self.start: dict[str, float] = {"ready_s": time.perf_counter() - started_s, **ready}
        self._signal(signal.SIGSTOP)

    def ask(self, *, workload: Workload, batch: int, seed: int) -> dict[str, Any]:
        """The figures of one round."""
        self._signal(signal.SIGCONT)
        time.sleep(_AWAKE_S)
        request = {"batch": batch, "seed": seed, "new_tokens": workload.new_tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # what ended by itself was told of by `ask`
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"A worker ended with {self._process.returncode}; its output ends:\n{tail}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
