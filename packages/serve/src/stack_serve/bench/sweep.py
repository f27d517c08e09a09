"""A sweep over loads, which are run one after another."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.call import Call, make_call
from stack_serve.bench.lengths import Lengths
from stack_serve.bench.load import Load, run_load
from stack_serve.bench.objective import Objective
from stack_serve.bench.requests import Requests
from stack_serve.bench.results import Point, Results
from stack_serve.client.endpoint import Endpoint

__all__ = ["Sweep"]

_CALIBRATION_TOKENS = 200

Show = Callable[[Load, int], None]
"""Progress callback: receives a load and the number of its requests that have ended."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Workload and loads of a benchmark run.

    Attributes:
      loads: loads to measure, in order.
      prompts, answers, chat, vocab_size, extra, seed: fields of `Requests`.
      warm_up: number of uncounted requests before the first load.
      objective: limits that define the goodput; None if it is not measured.
    """

    loads: tuple[Load, ...]
    prompts: Lengths
    answers: Lengths
    chat: bool = False
    vocab_size: int | None = None
    extra: dict[str, Any]
    seed: int = 0
    warm_up: int = 0
    objective: Objective | None = None

    async def measured(self, endpoint: Endpoint, model: str | None = None, show: Show = lambda *_: None) -> Results:
        """Calibrates the prompts, warms up the server and runs all loads.

        Args:
          model: name of the model; None selects the first model listed by the server.
          show: progress callback.

        Raises:
          BenchmarkError: a request fails before the first load.
          RequestFailed: the server does not list its models.
        """
        requests = Requests(
            model=model or await _first_model(endpoint),
            prompts=self.prompts,
            answers=self.answers,
            seed=self.seed,
            vocab_size=self.vocab_size,
            chat=self.chat,
            extra=self.extra,
        )
        requests = await self._calibrated(endpoint, requests)
        await self._warm(endpoint, requests)
        points = [await self._point(endpoint, requests, load, show) for load in self.loads]
        return Results(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            address=endpoint.address,
            model=requests.model,
            workload=self._workload(),
            objective=None if self.objective is None else self.objective.limits,
            points=tuple(points),
        )

    async def _calibrated(self, endpoint: Endpoint, requests: Requests) -> Requests:
        """Sets the number of words per token from the server's token count of a sample text."""
        task = requests.task(_CALIBRATION_TOKENS, 1, random.Random(f"{self.seed} calibration"))
        call = _succeeded(await make_call(endpoint, task))
        if self.vocab_size is not None or not call.prompt_tokens:
            return requests
        return replace(requests, words_per_token=_CALIBRATION_TOKENS / call.prompt_tokens)

    async def _warm(self, endpoint: Endpoint, requests: Requests) -> None:
        for task in itertools.islice(requests.tasks("warm-up"), self.warm_up):
            _succeeded(await make_call(endpoint, task))

    async def _point(self, endpoint: Endpoint, requests: Requests, load: Load, show: Show) -> Point:
        ended = 0

        def note(call: Call) -> None:
            nonlocal ended
            ended += 1
            show(load, ended)

        show(load, 0)
        return Point.of(await run_load(endpoint, requests, load, on_call=note), self.objective)

    def _workload(self) -> dict[str, Any]:
        names = ("prompts", "answers", "chat", "vocab_size", "extra", "seed", "warm_up")
        given = {name: getattr(self, name) for name in names}
        return {name: str(value) if isinstance(value, Lengths) else value for name, value in given.items()}


async def _first_model(endpoint: Endpoint) -> str:
    models = await endpoint.models()
    if not models:
        raise BenchmarkError(f"{endpoint.address} lists no model. Name one with --model.")
    return models[0]


def _succeeded(call: Call) -> Call:
    if call.failure is not None:
        raise BenchmarkError(f"Nothing was measured because a first request failed ({call.failure}): {call.message}")
    return call
