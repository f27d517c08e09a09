"""Prompt lookup (Saxena, 2023): repeats the successor of the last earlier occurrence of a token, without a model."""

import time
from dataclasses import fields

from stack_core.abi.engines import Engine
from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import EngineStats, GenerationUpdate, RequestTimes, SamplingParams


class Lookup(Engine):
    def __init__(self, checkpoint, config=None):
        self._checkpoint = checkpoint
        self._streams, self._counts = {}, {"prompt_tokens": 0, "generated_tokens": 0}

    def start(self):
        pass

    def close(self, *, drain_s=0.0):
        pass

    def submit(self, request, receive=None):
        if not request.prompt:
            raise GenerationError("The prompt has no tokens.", parameter="prompt")
        for name, default in vars(SamplingParams()).items():
            if name not in ("max_tokens", "temperature", "seed") and getattr(request.sampling, name) != default:
                raise GenerationError(f"Nothing is sampled, so omit {name}.", parameter=name)
        tokens, most, started_s = list(request.prompt), self._checkpoint.max_positions, time.monotonic()
        limit = min(most - len(tokens), request.sampling.max_tokens or most)
        ending = "length"
        for _ in range(limit):
            earlier = [place for place in range(len(tokens) - 1) if tokens[place] == tokens[-1]]
            if not earlier or tokens[earlier[-1] + 1] in self._checkpoint.end_tokens:
                ending = "stop"
                break
            tokens.append(tokens[earlier[-1] + 1])
        new = tuple(tokens[len(request.prompt) :])
        self._counts["prompt_tokens"] += len(request.prompt)
        self._counts["generated_tokens"] += len(new)
        update = GenerationUpdate(
            request_id=request.request_id,
            tokens=new,
            text=self._checkpoint.tokenizer.decode(new),
            weights_versions=(0,) * len(new),
            finish_reason=ending,
            times=RequestTimes(started_s, started_s, time.monotonic(), time.monotonic()),
        )
        if receive is None:
            self._streams[request.request_id] = update
        else:
            receive(update)

    def stream(self, request_id):
        yield self._streams.pop(request_id)

    def abort(self, request_id):
        self._streams.pop(request_id, None)

    def update_weights(self, params, *, version=None, kv="keep", donate=False):
        pass

    def stats(self):
        return EngineStats(**dict.fromkeys((field.name for field in fields(EngineStats)), 0) | self._counts)
