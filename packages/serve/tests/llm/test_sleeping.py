"""Sleep of the engine, which frees its device memory."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, GenerationError
from stack_core.abi.generation import GenerationRequest
from stack_serve import LLM, SamplingParams
from stack_serve.llm.sleeping import HostWeights

from .tiny_checkpoint import TinyCheckpoint, random_params

PROMPT = list(range(1, 21))  # more than a page, which is kept as a prefix
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TinyCheckpoint(), max_sequences=4, step_tokens=16, page_tokens=4) as llm:
        yield llm


def arrays(llm: LLM) -> list[Any]:
    programs = llm._engine._programs
    return [*jax.tree.leaves(programs._layers), *jax.tree.leaves(programs.params)]


@pytest.mark.parametrize(("level", "keeps"), [(1, True), (2, False)])
def test_an_engine_sleeps_and_answers_as_before(llm: LLM, level: Any, keeps: bool) -> None:
    (before,) = llm.generate([PROMPT], GREEDY)
    llm.sleep(level)
    pages = jax.tree.leaves(llm._engine._programs._layers)
    assert all(page.is_deleted() for page in pages)
    # On CPUs, the weights are in host memory in any case.
    assert all(each.is_deleted() != keeps for each in jax.tree.leaves(llm._engine._programs.params))
    for refused in (lambda: llm.generate([[1]], GREEDY), lambda: llm.embed([[1]]), llm.sleep):
        with pytest.raises(GenerationError, match="The engine sleeps"):
            refused()
    with pytest.raises(GenerationError, match="The engine sleeps"):
        llm._engine.update_weights(random_params(1))
    llm.wake_up()
    llm.wake_up()
    assert not any(each.is_deleted() for each in arrays(llm))
    (after,) = llm.generate([PROMPT], GREEDY)
    assert after.outputs == before.outputs
    np.testing.assert_allclose(llm.embed([[1, 2]]), llm.embed([[1, 2]]))


def test_level_two_returns_to_the_weights_of_the_checkpoint(llm: LLM) -> None:
    (before,) = llm.generate([PROMPT], GREEDY)
    llm._engine.update_weights(random_params(1))
    (other,) = llm.generate([PROMPT], GREEDY)
    llm.sleep(1)
    llm.wake_up()
    assert llm.generate([PROMPT], GREEDY)[0].outputs == other.outputs
    llm.sleep(2)
    llm.wake_up()
    assert llm.generate([PROMPT], GREEDY)[0].outputs == before.outputs != other.outputs


def test_a_busy_engine_does_not_sleep(llm: LLM) -> None:
    request = GenerationRequest(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    llm._engine.submit(request)
    with pytest.raises(EngineBusy, match="1 requests run"):
        llm.sleep()
    assert sum(len(update.tokens) for update in llm._engine.stream("a")) == 40
    llm.sleep()
    llm.wake_up()


def test_a_wake_up_waits_for_a_sleep_that_has_begun(llm: LLM) -> None:
    (before,) = llm.generate([PROMPT], GREEDY)
    engine, may_sleep = llm._engine, threading.Event()

    def delay() -> None:
        assert may_sleep.wait(60)

    with engine._lock:
        engine._post(delay)
    threads = [threading.Thread(target=call) for call in (llm.sleep, llm.wake_up)]
    threads[0].start()
    while not engine._sleeping:
        time.sleep(0.001)
    threads[1].start()
    threads[1].join(0.2)
    may_sleep.set()
    for thread in threads:
        thread.join(60)
    assert llm.generate([PROMPT], GREEDY)[0].outputs == before.outputs


def test_weights_are_not_updated_if_the_engine_sleeps_meanwhile(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = llm.generate([PROMPT], GREEDY)
    programs = llm._engine._programs
    place = programs.place

    def place_slowly(params: Any, *, donate: bool) -> Any:
        llm.sleep(2)
        return place(params, donate=donate)

    monkeypatch.setattr(programs, "place", place_slowly)
    with pytest.raises(GenerationError, match="The engine sleeps"):
        llm._engine.update_weights(random_params(1))
    llm.wake_up()
    assert llm.generate([PROMPT], GREEDY)[0].outputs == before.outputs


def test_other_engines_do_not_sleep() -> None:
    for method in (Engine.sleep, Engine.wake_up):
        with pytest.raises(GenerationError, match="cannot sleep"):
            method(object())  # type: ignore[arg-type]


def test_weights_return_from_host_memory() -> None:
    params = random_params()
    kept = HostWeights.of(params)
    assert all(isinstance(each, np.ndarray) for each in jax.tree.leaves(kept.arrays))
    placed = kept.restored()
    jax.tree.map(np.testing.assert_array_equal, placed, params)
    assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(placed))
