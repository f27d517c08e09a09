"""Load generation at a request rate or at a concurrency."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

from stack_serve.bench.call import Call, make_call
from stack_serve.bench.requests import Requests, Task
from stack_serve.client.endpoint import Endpoint

__all__ = ["Load", "LoadResult", "run_load"]

Send = Callable[[Task, float | None], Coroutine[None, None, None]]


@dataclass(frozen=True)
class Load:
    """One point of a sweep.

    Attributes:
      kind: "rate" (open loop: requests arrive as a Poisson process) or "concurrency" (closed loop: each client sends
        its next request when the previous one ends).
      value: requests per second, where infinity sends all immediately, or number of clients.
      requests: total number of requests.
    """

    kind: str
    value: float
    requests: int

    def __str__(self) -> str:
        return f"{self.value:g} requests/s" if self.kind == "rate" else f"{self.value:g} at once"


@dataclass
class LoadResult:
    """Result of a load.

    Attributes:
      load: load that was run.
      calls: measured requests in the order in which they ended.
      duration_s: time from the start of the load to the end of its last request.
      client_cpu_s: CPU time of the client process in that time.
    """

    load: Load
    calls: list[Call] = field(default_factory=list)
    duration_s: float = 0.0
    client_cpu_s: float = 0.0


async def run_load(
    endpoint: Endpoint, requests: Requests, load: Load, *, on_call: Callable[[Call], None] = lambda call: None
) -> LoadResult:
    """Sends all requests of a load and calls `on_call` after each."""
    tasks = itertools.islice(requests.tasks(str(load)), load.requests)
    result = LoadResult(load)

    async def send(task: Task, due_s: float | None) -> None:
        call = await make_call(endpoint, task, due_s=due_s)
        result.calls.append(call)
        on_call(call)

    started_s, cpu_s = time.perf_counter(), time.process_time()
    if load.kind == "rate":
        await _at_rate(send, tasks, load.value, random.Random(f"{requests.seed} arrivals"))
    else:
        await asyncio.gather(*(_in_turn(send, tasks) for _ in range(int(load.value))))
    result.duration_s = time.perf_counter() - started_s
    result.client_cpu_s = time.process_time() - cpu_s
    return result


async def _in_turn(send: Send, tasks: Iterator[Task]) -> None:
    for task in tasks:  # the clients share one iterator
        await send(task, None)


async def _at_rate(send: Send, tasks: Iterator[Task], rate: float, source: random.Random) -> None:
    due_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(send(task, due_s))
            due_s += source.expovariate(rate) if math.isfinite(rate) else 0.0
