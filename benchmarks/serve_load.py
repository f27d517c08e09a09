"""Many streams at once against a real server, some of which hang up: nothing may be lost, mixed up, leaked or compiled.

    nox -s bench -- serve_load --minutes 5 --streams 200
    nox -s bench -- serve_load --minutes 0.5 --before main --rounds 4     # what a change costs

The answers of some requests are asked for one at a time first: half of them plain completions, a quarter completions
with a JSON Schema, and a quarter chats that have to call a tool. Then each stream asks for a random one at a random
length, again and again; some hang up at once, some in the middle. An answer has to begin as the known one does and to
have all its tokens. At the end no page may be in use and no program may have been compiled, and the server's memory has
to have stayed as it was. Exits with 1 where it has not. `--before COMMIT` puts a server of that commit under the same
load in turns, each for `--minutes`, and tells the ratios of tokens a second and of the server's CPU time a token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers import before
from report import RESULTS, circumstances, write
from serving.checkpoint import write_checkpoint
from serving.completions import body_of, tokens_of
from serving.workload import Workload

from stack_serve.client.endpoint import Endpoint, RequestFailed

WORKLOAD = Workload(layers=2, embed=128, heads=4, kv_heads=2, mlp=256, vocab=4096, max_positions=512)
HANG_UP_SHARE = 0.2
MOST_GROWTH_BYTES_PER_MINUTE = 2e6
SETTLE_S = 30.0
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "numbers": {"type": "array"}}}
SCHEMA |= {"required": ["text", "numbers"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find_number", "count_words")
]
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
_LEFT = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
_SIZES = {"first": "at first", "last": "at last", "most": "at most"}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HungUp(Exception):
    """A stream had as many tokens as it wanted."""


@dataclass(frozen=True)
class Known:
    """A request and the greedy answer that it has alone.

    Attributes:
      kind: "plain", "schema" or "tools".
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        return "/chat/completions" if self.kind == "tools" else "/completions"

    def body(self, model: str, new_tokens: int) -> dict[str, object]:
        body = body_of(model, self.prompt, new_tokens)
        if self.kind == "schema":
            body["structured_outputs"] = {"json": SCHEMA}
        if self.kind == "tools":
            del body["prompt"]
            text = " ".join(map(str, self.prompt[:_MOST_WORDS]))
            body |= {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "tool_choice": "required"}
        return body


_KINDS = ("plain", "schema", "tools", "plain")
_MOST_WORDS = 20


@dataclass
class Tally:
    """What became of the streams: how many completed, hung up, or went wrong, and the first few that did.

    Attributes:
      kinds: number of completed answers by the kind of request.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def note_wrong(self, what: str, message: str) -> None:
        self.outcomes[what] += 1
        if len(self.wrong) < 10:
            self.wrong.append(f"{what}: {message}")


def main() -> None:
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    name, python = "serve_load", Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _model(Path(folder))
        if options.before is None:
            found = under_load(python, model, options)
        else:
            name = f"{name}-before-{options.before[:12]}"
            earlier = before.environment_of(options.before, options.environments / f"stack-at-{options.before[:12]}")
            found = _beside(python, earlier, model, options)
    record = {**circumstances(), "streams": options.streams, "minutes": options.minutes, **found}
    write(options.results, name, record, _markdown(record))
    if record["failures"]:
        sys.exit("\n".join(record["failures"]))


def _beside(python: Path, earlier: Path, model: Path | str, options: argparse.Namespace) -> dict[str, Any]:
    """Today's server and an earlier one in turns: what came of today's last load, and the ratios of all rounds."""
    ratios: dict[str, list[float]] = {"tokens_per_s": [], "cpu_us_a_token": []}
    failures: list[str] = []
    found: dict[str, Any] = {}
    for number in range(options.rounds):
        turns = ((python, "now"), (earlier, "then"))
        rounds = {name: under_load(each, model, options) for each, name in turns[:: 1 if number % 2 else -1]}
        found = rounds["now"]
        failures += found["failures"]
        for figure, values in ratios.items():
            values.append(rounds["now"][figure] / rounds["then"][figure])
        print(f"round {number}: " + ", ".join(f"{figure} {values[-1]:.3f}" for figure, values in ratios.items()))
    spread = {name: [statistics.median(each), min(each), max(each)] for name, each in ratios.items()}
    return {**found, "failures": failures, "before": options.before, "rounds": options.rounds, "ratios": spread}


def under_load(python: Path, model: Path | str, options: argparse.Namespace) -> dict[str, Any]:
    """What comes of a load on a server of the environment that a Python is of."""
    with served(python, model, options) as server:
        return asyncio.run(loaded(server, options))


@dataclass(frozen=True)
class Server:
    """A server process."""

    address: str
    process: int

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process}/statm").read_text().split()[1]) * _PAGE_BYTES

    def cpu_s(self) -> float:
        """CPU seconds that it has taken, in itself and for it in the kernel."""
        user, system = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def served(python: Path, model: Path | str, options: argparse.Namespace) -> Iterator[Server]:
    """The server, on a port of its own; it has to end with 0 when it is told to."""
    stack = python.with_name("stack")
    sizes = ["--max-sequences", options.max_sequences, "--max-waiting", 4 * options.streams, "--pages", options.pages]
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        command = [stack, "serve", model, "--port", 0, "--json", *sizes, "--chat-template", template.name]
        with _process(command) as server:
            yield server


@contextlib.contextmanager
def _process(command: Sequence[Any]) -> Iterator[Server]:
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if not ready:
            sys.exit(f"The server ended with {process.wait()}.")
        yield Server(json.loads(ready)["address"], process.pid)
        process.terminate()
        if process.wait(60):
            sys.exit(f"The server ended with {process.returncode} after SIGTERM.")
    finally:
        process.kill()
        process.wait()


async def loaded(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and says what came of it."""
    async with Endpoint(server.address, timeout_s=120.0) as endpoint:
        model = (await endpoint.models())[0]
        source = random.Random(options.seed)
        known = [await _known(endpoint, model, source, _KINDS[number % len(_KINDS)]) for number in range(options.known)]
        at_first = await _warm(server)
        tally, samples, cpu_s = Tally(), [], server.cpu_s()
        end_s = time.monotonic() + 60 * options.minutes
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(server, samples))
            sources = [random.Random(f"{options.seed} {number}") for number in range(options.streams)]
            asking = (_stream(endpoint, model, known, tally, source, end_s) for source in sources)
            await asyncio.wait([group.create_task(each) for each in asking])
            watching.cancel()
        cpu_s = server.cpu_s() - cpu_s
        await asyncio.sleep(1.0)
        at_last = await metrics(server.address)
    return {"cpu_us_a_token": 1e6 * cpu_s / tally.tokens, **_summary(tally, samples, at_first, at_last, options)}


async def _known(endpoint: Endpoint, model: str, source: random.Random, kind: str) -> Known:
    length = source.choice((3, 20, 64, 150, 300))
    asked = Known(kind, tuple(source.randrange(1, WORKLOAD.vocab) for _ in range(length)))
    tokens: list[int] = []
    await endpoint.stream(asked.path, asked.body(model, 128), lambda data, _: tokens.extend(tokens_of(data)))
    return replace(asked, answer=tuple(tokens))


async def _stream(
    endpoint: Endpoint, model: str, known: Sequence[Known], tally: Tally, source: random.Random, end_s: float
) -> None:
    """One client, which asks again and again."""
    while time.monotonic() < end_s:
        case = source.choice(known)
        wanted = source.randint(1, len(case.answer))
        hang_up_after = source.randint(0, wanted) if source.random() < HANG_UP_SHARE else None
        await _ask(endpoint, model, case, wanted, hang_up_after, tally)


async def _ask(
    endpoint: Endpoint, model: str, case: Known, wanted: int, hang_up_after: int | None, tally: Tally
) -> None:
    """One answer, compared with the known one; `hang_up_after` so many tokens, 0 being before there are any."""
    tokens: list[int] = []

    def receive(data: bytes, arrived_s: float) -> None:
        tokens.extend(tokens_of(data))
        if hang_up_after and len(tokens) >= hang_up_after:
            raise HungUp

    wait_s = 0.02 if hang_up_after == 0 else None
    try:
        async with asyncio.timeout(wait_s):
            await endpoint.stream(case.path, case.body(model, wanted), receive)
        expected = case.answer[:wanted]
        outcome = "completed"
    except (HungUp, TimeoutError):
        expected = case.answer[: len(tokens)]
        outcome = "hung up"
    except RequestFailed as error:
        tally.note_wrong("failed", f"{error.kind}: {error}")
        return
    tally.tokens += len(tokens)
    if tuple(tokens) == expected:
        tally.outcomes[outcome] += 1
        tally.kinds[case.kind] += outcome == "completed"
    else:
        tally.note_wrong("wrong", f"{tokens} instead of {list(expected)} after {list(case.prompt[:5])}...")


async def _watch(server: Server, samples: list[tuple[float, int]]) -> None:
    while True:
        samples.append((time.monotonic(), server.rss_bytes()))
        await asyncio.sleep(0.5)


async def _warm(server: Server) -> dict[str, float]:
    """Waits until the server has compiled all its programs; returns its metrics."""
    while (now := await metrics(server.address))["stack:engine_programs_to_compile"]:
        await asyncio.sleep(0.2)
    return now


async def metrics(address: str) -> dict[str, float]:
    """The server's metrics, those of one name summed."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode())
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.partition("{")[0].split()[0], float(line.split()[-1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _summary(
    tally: Tally,
    samples: Sequence[tuple[float, int]],
    at_first: dict[str, float],
    at_last: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Figures, and what is not as it has to be."""
    settled = [(at_s, rss) for at_s, rss in samples if at_s > samples[0][0] + SETTLE_S]
    growth = None
    if len(settled) > 1:
        slope, _ = statistics.linear_regression(*zip(*settled, strict=True))
        growth = 60 * slope
    compiled = at_last["stack:engine_compilations_total"] - at_first["stack:engine_compilations_total"]
    left = {name: at_last[f"vllm:{name}"] for name in _LEFT}
    failures = [f"{name} is {value} once all streams have ended" for name, value in left.items() if value]
    failures += tally.wrong
    if compiled:
        failures.append(f"{compiled:.0f} programs were compiled under load")
    if growth is not None and growth > MOST_GROWTH_BYTES_PER_MINUTE:
        failures.append(f"memory grows by {growth / 1e6:.1f} MB a minute")
    if not tally.outcomes["hung up"] or not all(tally.kinds[kind] for kind in _KINDS):
        failures.append(f"not everything was tested: {dict(tally.outcomes)}, {dict(tally.kinds)}")
    return {
        "outcomes": dict(tally.outcomes),
        "completed": dict(tally.kinds),
        "tokens_per_s": tally.tokens / (60 * options.minutes),
        "preemptions": at_last["vllm:num_preemptions_total"],
        "compilations": compiled,
        "left": left,
        "rss_bytes": {"first": samples[0][1], "last": samples[-1][1], "most": max(rss for _, rss in samples)},
        "rss_growth_bytes_per_minute": growth,
        "failures": failures,
    }


def _markdown(record: Mapping[str, Any]) -> str:
    machine, rss, growth = record["machine"], record["rss_bytes"], record["rss_growth_bytes_per_minute"]
    counts = Counter(record["outcomes"])
    sizes = ", ".join(f"{rss[name] / 1e6:.0f} MB {when}" for name, when in _SIZES.items())
    flat = "too short a run to tell growth" if growth is None else f"{growth / 1e6:+.2f} MB a minute"
    lines = [
        "# A server under load",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {record['streams']} streams at once for "
        f"{record['minutes']:g} minutes, prompts of 3 to 300 tokens, answers of 1 to 128, a fifth hung up on. "
        "Half of the requests are plain, a quarter has a JSON Schema, a quarter has to call a tool.",
        "",
        f"- {counts['completed']} answers complete and as they are alone, {counts['hung up']} hung up on, "
        f"{counts['wrong']} wrong, {counts['failed']} failed; {record['tokens_per_s']:.0f} tokens/s, "
        f"{record['cpu_us_a_token']:.0f} us of the server's CPU a token",
        f"- {record['preemptions']:.0f} preemptions, {record['compilations']:.0f} compilations",
        f"- left over: {', '.join(f'{name} {value:g}' for name, value in record['left'].items())}",
        f"- memory {sizes}; {flat}",
        *(f"- {name} over {record['before'][:12]}: {_spread(each)}" for name, each in record.get("ratios", {}).items()),
        *(f"- **{failure}**" for failure in record["failures"]),
    ]
    return "\n".join(lines) + "\n"


def _spread(ratio: Sequence[float]) -> str:
    median, least, most = ratio
    return f"{median:.3f} ({least:.3f} to {most:.3f})"


def _model(folder: Path) -> Path:
    return write_checkpoint(folder, WORKLOAD, dtype="float32")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--known", type=int, default=64, help="prompts whose answers are asked for one at a time first")
    parser.add_argument("--max-sequences", type=int, default=32)
    parser.add_argument("--pages", type=int, default=240, help="few enough that sequences are preempted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="another than the small one that is made here; of at least 4,096 tokens")
    parser.add_argument("--before", type=before.full_commit, help="a commit of this repository, to serve in turns")
    parser.add_argument("--rounds", type=int, default=4, help="of both servers, with --before")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "stack" / "bench-envs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
