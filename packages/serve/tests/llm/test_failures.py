"""Every accepted request ends exactly once, wherever the engine fails."""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import StackError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.ops.sampling.logprobs import MOST_LOGPROBS, TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled
from stack_serve.llm import dispatcher, loop, output, pages, scheduler, work
from stack_serve.llm import engine as engine_module
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.placement import Placement
from stack_serve.llm.programs import Programs, StepResult

from .test_engine import Words
from .tiny_checkpoint import TinyCheckpoint, random_params

CONFIG = EngineConfig(max_sequences=2, step_tokens=8, page_tokens=4, pages=6, max_tokens=16)
MODULES = (engine_module, loop, output, pages, scheduler, dispatcher, work, sys.modules[__name__])
# The last resort: entry points of threads, the code that ends requests after a failure, and locks.
LAST_RESORT = {"_run", "_next", "_end_all", "_fail", "_bare_end", "close", "__enter__", "__exit__"}


def figures_of(*axes: int) -> dict[str, np.ndarray]:
    tops = (*axes, MOST_LOGPROBS)
    kinds = {"tokens": np.int32, "logprobs": np.float32, "ranks": np.int32}
    named = {name: np.ones(axes, kind) for name, kind in kinds.items()}
    return {**named, "top_tokens": np.zeros(tops, np.int32), "top_logprobs": np.zeros(tops, np.float32)}


class FakePrograms(Programs):
    """Samples token 1 after everything."""

    def __init__(self, checkpoint: Any, *_: Any, **__: Any) -> None:
        self.hidden, self._images = jnp.zeros((1, 1, 1)), None
        self._placement = Placement(checkpoint.states, 1)

    def admit(self, slot: int, tokens: Any, settings: Any) -> None: ...

    def decodes(self, rows: int) -> bool:
        return True

    def step(
        self, rows: Any, tables: Any, *, repeats: int = 1, candidates: bool = False, images: Any = None
    ) -> StepResult:
        sampled = Sampled(**figures_of(repeats, len(rows)), ok=np.ones((repeats, len(rows)), bool))
        return StepResult(sampled, self.hidden)

    def prompt_logprobs(self, result: StepResult, targets: Any) -> TokenLogprobs:
        return TokenLogprobs(**figures_of(len(targets)))

    def place(self, params: Any, *, donate: bool) -> Any:
        return params

    def use(self, placed: Any) -> None: ...

    def stop_compiling(self) -> None: ...


PARAMS = random_params()
Point = tuple[str, str, int]


class Tracer:
    """Records the calls that the threads of an engine make from its modules, and makes one of them fail.

    Attributes:
      points: callee, and the file and line of the call.
    """

    def __init__(self, failing: Point | None = None, error: Callable[[str], BaseException] = RuntimeError) -> None:
        self.points: dict[Point, None] = {}
        self._failing, self._error = failing, error

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        caller, callee = frame.f_back, frame.f_code.co_name
        if _checks_types(frame) or (_checks_types(caller) and not _is_of_engine(frame)):
            return
        while _checks_types(caller):
            caller = caller.f_back
        if caller is None or not _is_of_engine(caller):
            return
        if callee in LAST_RESORT or caller.f_code.co_name in LAST_RESORT - {"_run"}:
            return
        point = (callee, caller.f_code.co_filename, caller.f_lineno)
        is_new = point not in self.points
        self.points[point] = None
        if is_new and point == self._failing:
            raise self._error("this point fails")


def _checks_types(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to a run-time type check or to generated code of a dataclass."""
    return frame is not None and (frame.f_code.co_filename.startswith("<") or "jaxtyping" in frame.f_code.co_filename)


def _is_of_engine(frame: FrameType) -> bool:
    return any(frame.f_code.co_filename == vars(module)["__file__"] for module in MODULES)


def ends_of(tracer: Tracer) -> tuple[Counter[Any], Counter[Any]]:
    """Returns how often each continuation ended, and the expected number: one if it was accepted."""
    told = list[GenerationUpdate]()
    engine = LLMEngine(TinyCheckpoint(tokenizer=Words()), CONFIG)
    assert isinstance(engine._programs, FakePrograms)
    accepted: dict[str, int] = {}

    def submit(name: str, prompt: tuple[int, ...], **sampling: Any) -> None:
        timeout_s = sampling.pop("timeout_s", None)
        params = SamplingParams(**{"max_tokens": 6, **sampling})
        request = GenerationRequest(request_id=name, prompt=prompt, sampling=params, timeout_s=timeout_s)
        try:
            engine.submit(request, told.append)
        except StackError:  # it was not accepted
            return
        accepted[name] = params.n

    submit("two", (1, 2, 3), n=2, logprobs=1, prompt_logprobs=0)
    submit("stopped", (4,), stop=("bb",), seed=3)
    submit("late", (4, 5), timeout_s=1e-4)
    threading.settrace(tracer)
    try:
        engine.start()
    finally:
        threading.settrace(None)  # pyrefly: ignore
    submit("aborted", (6,) * 9)
    engine.abort("aborted")
    with contextlib.suppress(StackError):
        engine.update_weights(PARAMS, kv="recompute")
    submit("more", (7,), max_tokens=2)
    engine.close(drain_s=5.0)
    ends = Counter((update.request_id, update.index) for update in told if update.finish_reason is not None)
    expected = Counter({(name, index): 1 for name, count in accepted.items() for index in range(count)})
    return ends, expected


@pytest.mark.parametrize("calls", ["one", pytest.param("all", marks=pytest.mark.slow)])
def test_a_failure_at_any_point_leaves_no_request_without_its_end(monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    """Fails at one call of each function, or at all of them."""
    monkeypatch.setattr(engine_module, "programs_class", lambda _: FakePrograms)
    monkeypatch.setattr(engine_module, "give_memory_back", lambda: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = sys.gettrace()
    points: dict[Point, None] = {}
    for _ in range(3):  # the reachable points depend on the order of the threads
        tracer = Tracer()
        ends, expected = ends_of(tracer)
        assert ends == expected
        points |= tracer.points
    assert {"schedule", "step", "begin", "push", "put", "flush", "deliver", "_drop", "_forget"} <= {
        name for name, *_ in points
    }
    failing = points if calls == "all" else {callee: point for point in points for callee in point[:1]}.values()
    for number, point in enumerate(failing):
        ends, expected = ends_of(Tracer(point, (RuntimeError, KeyboardInterrupt)[number % 2]))
        assert ends == expected, point
    assert sys.gettrace() is before
