"""A model of bigrams and an engine for it, which workers import by name."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, GenerationError
from stack_core.abi.generation import EngineStats, GenerationUpdate, RequestTimes, TokenLogprob

VOCAB = 8
BUSY, BROKEN, SLOW = 5, 6, 7  # first tokens of prompts with a meaning


@dataclass(frozen=True)
class Checkpoint:
    """A `GenerativeCheckpoint` that leaves its parameters behind when it is pickled."""

    table: Any = None
    name: str = "table"
    states: Any = None
    vocab_size: int = VOCAB
    max_positions: int = 100
    tokenizer: Any = None
    end_tokens: frozenset[int] = frozenset()
    chat_template: Any = None
    special_tokens: Any = field(default_factory=dict)
    sampling_defaults: Any = field(default_factory=dict)

    @property
    def parameters(self):
        shape = jax.ShapeDtypeStruct((VOCAB, VOCAB), np.float32)
        return {"table": shape, "bias": jax.ShapeDtypeStruct((VOCAB,), np.float32)}

    def __getstate__(self):
        return {**vars(self), "table": None}

    def load_params(self, shardings=None):
        assert shardings is None and self.table is not None, "loaded where the values are"
        return {"table": jax.numpy.asarray(self.table), "bias": jax.numpy.zeros(VOCAB)}

    def model(self, params): ...

    def shardings(self, mesh):
        return {
            "table": NamedSharding(mesh, PartitionSpec(("fsdp",), None)),
            "bias": NamedSharding(mesh, PartitionSpec()),
        }


class TableEngine(Engine):
    """Answers with the most likely next tokens of its table, each request on a thread of its own."""

    keeps_missing = reports_experts = True

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint
        self._params = {name: np.asarray(value) for name, value in checkpoint.load_params().items()}
        self._version, self._served = 0, 0
        self._requests = {}
        self._aborted = set()

    def start(self): ...

    def close(self, *, drain_s=0.0): ...

    def submit(self, request, receive=None):
        first = request.prompt[0]
        if first == BUSY:
            raise EngineBusy("the queue is full", retry_after_s=0.25)
        if first == BROKEN:
            raise ZeroDivisionError("a defect")
        if request.sampling.stop:
            raise GenerationError("no stop texts here", parameter="stop")
        if receive is None:
            self._requests[request.request_id] = request
            return
        threading.Thread(target=lambda: [receive(each) for each in self._updates(request)], daemon=True).start()

    def stream(self, request_id):
        yield from self._updates(self._requests.pop(request_id))

    def _updates(self, request):
        began_s, token = time.monotonic(), request.prompt[-1]
        count = request.sampling.max_tokens
        for place in range(count):
            if request.prompt[0] == SLOW:
                time.sleep(0.02)
            scores = self._params["table"][token] + self._params["bias"]
            logprobs = scores - np.log(np.exp(scores).sum())
            token = int(np.argmax(scores))
            aborted = request.request_id in self._aborted
            reason = "abort" if aborted else "length" if place == count - 1 else None
            yield GenerationUpdate(
                request_id=request.request_id,
                tokens=(token,),
                weights_versions=(self._version,),
                logprobs=(TokenLogprob(token, float(logprobs[token]), 1),),
                finish_reason=reason,
                times=RequestTimes(began_s - 5.0, began_s - 4.0) if reason else None,
            )
            if reason:
                break
        self._served += 1

    def abort(self, request_id):
        self._aborted.add(request_id)

    def update_weights(self, params, *, version=None, kv="keep", donate=False):
        assert donate, "the engine owns what was transferred"
        if params.get("bias") is not None and np.isnan(np.asarray(params["bias"])).any():
            raise GenerationError("no NaN here", parameter="bias")
        self._params = {**self._params, **{name: np.asarray(value) for name, value in params.items()}}
        self._version = self._version + 1 if version is None else version

    def stats(self):
        counts = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**{**counts, "running": len(jax.devices()), "steps": self._served})


class ShardedTableEngine(TableEngine):
    """Notes how the parameters that it was given are split."""

    def __init__(self, checkpoint):
        self._specs = {name: tuple(value.sharding.spec) for name, value in checkpoint.load_params().items()}
        super().__init__(checkpoint)

    @property
    def adapters(self):
        return tuple(f"{name} {spec}" for name, spec in sorted(self._specs.items()))


def fail(checkpoint):
    raise GenerationError(f"cannot open {checkpoint.name}", parameter="name")


def die(checkpoint):
    import os
    import sys

    sys.stderr.write("about to leave\n")
    sys.stderr.flush()
    os._exit(3)
