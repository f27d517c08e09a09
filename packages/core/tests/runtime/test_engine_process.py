"""An engine in another process: the same answers, the weights of each version, and a worker that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import (
    ClusterError,
    ConfigError,
    ConversionError,
    EngineBusy,
    EngineStopped,
    GenerationError,
)
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.mesh import MeshConfig
from stack_core.runtime.config import EngineProcessConfig
from stack_core.runtime.engine_process import EngineProcess

sys.path.insert(0, str(Path(__file__).parent))  # the worker imports it by this name
from table_engine import BROKEN, BUSY, SLOW, VOCAB, Checkpoint, ShardedTableEngine, TableEngine, die, fail

TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype("f4")


def request(name, prompt, max_tokens=4, **sampling):
    return GenerationRequest(
        request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, logprobs=0, **sampling)
    )


def answer(engine, name, prompt, **options):
    engine.submit(request(name, prompt, **options))
    return [token for update in engine.stream(name) for token in update.logprobs]


def expected(table, token, count=4):
    """The most likely tokens from `token` on, with their log-probabilities."""
    found = []
    for _ in range(count):
        logprobs = table[token] - np.log(np.exp(table[token]).sum())
        token = int(np.argmax(logprobs))
        found.append((token, round(float(logprobs[token]), 5)))
    return found


def values(logprobs):
    return [(each.token, round(each.logprob, 5)) for each in logprobs]


@pytest.fixture
def engine(bench):
    engine = EngineProcess(Checkpoint(TABLE), TableEngine, name="table")
    engine.start()
    yield engine
    engine.close()
    bench.wait_until_gone()


def test_it_answers_like_the_engine_in_this_process_with_the_weights_of_each_version(engine, bench):
    assert engine.pid in bench.processes() and engine.keeps_missing and engine.reports_experts
    assert engine.adapters == ()
    assert values(answer(engine, "a", (1, 2))) == expected(TABLE, 2)

    # Several at once, by callbacks that call the engine themselves.
    arrived, done = {}, threading.Semaphore(0)

    def receive(update):
        arrived.setdefault(update.request_id, []).append(update)
        if update.finish_reason is not None:
            engine.abort(update.request_id)
            done.release()

    for token in range(5):
        engine.submit(request(f"c{token}", (token,)), receive)
    for _ in range(5):
        assert done.acquire(timeout=10)
    for token in range(5):
        updates = arrived[f"c{token}"]
        assert [each.tokens[0] for each in updates] == [token for token, _ in expected(TABLE, token)]
    times = updates[-1].times
    assert times.started_s - times.submitted_s == pytest.approx(1.0)  # intervals as measured, on this clock
    assert 0 <= time.monotonic() - times.submitted_s < 4

    # While a slow request runs, others are served, and new weights are used by its next token.
    slow = threading.Thread(target=lambda: arrived.update(slow=answer(engine, "slow", (SLOW,), max_tokens=60)))
    slow.start()
    other = TABLE[::-1].copy()
    assert values(answer(engine, "b", (3,))) == expected(TABLE, 3)
    engine.update_weights({"table": jnp.asarray(other), "bias": jnp.zeros(VOCAB)}, version=7)
    engine.submit(request("d", (3,)))
    updates = list(engine.stream("d"))
    assert {each.weights_versions for each in updates} == {(7,)}
    assert values(updates[0].logprobs) == expected(other, 3)[:1]
    assert slow.is_alive(), "the slow request ended before the other ones"
    slow.join()
    assert len(arrived["slow"]) == 60

    # A part of the parameters, of another kind of array and another device type; the rest is kept.
    given = {"bias": jnp.eye(VOCAB, dtype="f4")[5] * 50}
    engine.update_weights(given, donate=True)
    assert given["bias"].is_deleted()
    assert values(answer(engine, "e", (3,))) == [(5, 0.0)] * 4  # exp(-50) rounds away
    engine.update_weights({"bias": np.zeros(VOCAB, "f4")})
    assert values(answer(engine, "f", (3,))) == expected(other, 3)
    assert engine.stats().steps > 5

    # An iterator that is closed early aborts its request.
    engine.submit(request("g", (SLOW,), max_tokens=90))
    stream = engine.stream("g")
    next(stream)
    stream.close()
    assert values(answer(engine, "g2", (3,))) == expected(other, 3)
    engine.close()
    with pytest.raises(EngineStopped, match="was closed"):
        engine.submit(request("z", (1,)))


def test_errors_are_raised_here_and_a_worker_that_is_killed_is_named_by_every_call(engine):
    with pytest.raises(GenerationError, match="no stop texts here") as found:
        engine.submit(request("a", (1,), stop=("x",)))
    assert found.value.parameter == "stop"
    with pytest.raises(EngineBusy) as busy:
        engine.submit(request("a", (BUSY,)))
    assert busy.value.retry_after_s == 0.25
    with pytest.raises(EngineStopped, match=r"(?s)ZeroDivisionError: a defect.*in submit"):
        engine.submit(request("a", (BROKEN,)))
    engine.submit(request("a", (1,)))
    with pytest.raises(GenerationError, match="still in progress"):
        engine.submit(request("a", (1,)))
    with pytest.raises(GenerationError, match="no request 'b' to stream"):
        next(engine.stream("b"))
    for wrong, message in (
        ({"table": jnp.zeros((2, 2))}, r"table has shape \(2, 2\); expected \(8, 8\)"),
        ({"tabel": jnp.zeros((8, 8))}, r"(?s)tabel is unknown.*table is missing"),
    ):
        with pytest.raises(ConversionError, match=message):
            engine.update_weights(wrong)
    gone = jnp.zeros(VOCAB)
    gone.delete()
    with pytest.raises(ConversionError, match="bias was deleted"):
        engine.update_weights({"bias": gone})
    with pytest.raises(GenerationError, match="no NaN here"):
        engine.update_weights({"bias": jnp.full(VOCAB, jnp.nan)})
    assert values(answer(engine, "c", (1, 2))) == expected(TABLE, 2)

    ended, done = [], threading.Event()
    engine.submit(request("d", (SLOW,), max_tokens=90), lambda update: (ended.append(update), done.set()))
    engine.submit(request("b", (SLOW,), max_tokens=90))
    stream = engine.stream("b")
    next(stream), done.wait(10)
    os.kill(engine.pid, signal.SIGKILL)
    said = rf"The process of the engine 'table' \(pid {engine.pid}\) is gone: ended by SIGKILL"
    *_, last = stream
    assert last.finish_reason == "error"
    with pytest.raises(EngineStopped, match=said):
        engine.update_weights({"bias": jnp.zeros(VOCAB)})
    for call in (engine.stats, lambda: engine.submit(request("c", (1,)))):
        with pytest.raises(EngineStopped, match=said):
            call()
    until_s = time.monotonic() + 5
    while ended[-1].finish_reason is None and time.monotonic() < until_s:
        time.sleep(0.01)
    assert ended[-1].finish_reason == "error" and "SIGKILL" in ended[-1].error


def test_each_device_gets_its_part_of_the_weights(bench, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    engine = EngineProcess(Checkpoint(TABLE), ShardedTableEngine, name="table", mesh=MeshConfig(fsdp=2, tensor=-1))
    assert engine.adapters == ("bias ()", "table ('fsdp', None)")
    engine.update_weights({"table": jnp.asarray(TABLE.T)})
    assert values(answer(engine, "a", (1, 2))) == expected(TABLE.T, 2)
    engine.close()
    bench.wait_until_gone()


def test_an_engine_that_cannot_be_opened_leaves_no_process(bench):
    with pytest.raises(GenerationError, match="cannot open table") as found:
        EngineProcess(Checkpoint(TABLE), fail, name="table")
    assert found.value.parameter == "name"
    with pytest.raises(ClusterError, match=r"(?s)exited with status 3.*about to leave"):
        EngineProcess(Checkpoint(TABLE), die, name="table")
    bench.wait_until_gone()
    with pytest.raises(ConfigError, match="JAX_PLATFORMS, which JAX reads when it is imported"):
        EngineProcessConfig(environment={"JAX_PLATFORMS": "cuda"})


CHILD = """
import os, signal, sys, time
from table_engine import Checkpoint, TableEngine
from test_engine_process import TABLE
from stack_core.runtime.engine_process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess(Checkpoint(TABLE), TableEngine, name="table")
    engine.start()
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_worker_ends_with_its_driver(bench, number):
    child = subprocess.run([sys.executable, "-c", CHILD, number.name], check=False, stderr=subprocess.DEVNULL)
    assert child.returncode == -number
    bench.wait_until_gone()
