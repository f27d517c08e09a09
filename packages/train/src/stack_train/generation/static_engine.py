"""The engine `static`: fixed-size batches over the dense cache, each decoded by a single jitted loop."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import PositiveInt

from stack_core.abi.caches import CacheStorage
from stack_core.abi.config import config
from stack_core.abi.data import Tokenizer
from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConversionError, EngineStopped, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    RequestTimes,
    SamplingParams,
    TokenLogprob,
)
from stack_core.ops.sampling.sampling import (
    MOST_BIASES,
    MOST_STOP_TOKENS,
    SamplingSettings,
    candidate_tokens,
)
from stack_core.runtime.tree_paths import path_name
from stack_core.text.detokenize import IncrementalDetokenizer
from stack_core.text.image_prompts import check_images
from stack_core.text.images import image_reader_of
from stack_core.text.sources import check_continues
from stack_train.generation.prompt_images import image_inputs
from stack_train.generation.static_program import generate_rows

__all__ = ["StaticEngine", "StaticEngineConfig"]

_LOG = logging.getLogger(__name__)
# Sizes in tokens. Small caches are cheap, and every size compiles one more program.
_SMALLEST_PROMPT, _SMALLEST_CAPACITY = 4, 16
# Shorter prompts cost less than the additional programs that sharing compiles.
_SMALLEST_SHARED_PROMPT = 32
_UNSUPPORTED = ("stop", "prompt_logprobs", "constraint", "logits_processors")


@config
class StaticEngineConfig:
    """Sizes of a static engine.

    Attributes:
      rows: number of continuations in a batch. Smaller batches are padded to this size. If `expect` announces fewer
        continuations, batches have the next power of two.
      kv_cache: storage format of keys and values in the cache; "model" is the model's own dtype.
    """

    rows: PositiveInt = 64
    kv_cache: CacheStorage = "model"


@dataclass
class _Work:
    """A request in progress.

    Attributes:
      receive: callback for updates; None for callers of `stream`.
      left: number of unfinished continuations.
      updates: updates that `stream` has not yielded yet.
    """

    request: GenerationRequest
    receive: Callable[[GenerationUpdate], None] | None
    times: RequestTimes
    left: int
    updates: list[GenerationUpdate] = field(default_factory=list)


@dataclass(frozen=True)
class _Continuation:
    work: _Work
    index: int
    limit: int


class StaticEngine(Engine):
    """An `Engine` for small models with static batching: each batch runs until its last row has finished.

    Prompts and caches are padded to powers of two to limit the number of programs. In a batch, a long prompt of several
    continuations, such as a group of rollouts, is prefilled once, and an image of several prompts is encoded once.
    Nothing remains between batches. The engine does not support paging or streaming within a continuation: each
    continuation is a single update. It samples with `stack_core.ops.sampling.sampling`, and rejects requests with stop
    texts or with log-probabilities of tokens other than the sampled ones.

    A request without `receive` is computed on the thread that calls `stream`, together with all requests submitted
    earlier. With a single thread, batches and tokens therefore depend only on the order of calls, bit for bit.

    Raises:
      StackError: the checkpoint cannot be read, or is an encoder-decoder.
    """

    keeps_missing = reports_experts = True

    def __init__(self, checkpoint: GenerativeCheckpoint, config: StaticEngineConfig | None = None) -> None:
        check_continues(checkpoint)
        self._checkpoint, self._config = checkpoint, StaticEngineConfig() if config is None else config
        self._reader = image_reader_of(checkpoint)
        self._params = checkpoint.load_params()
        self._rows = self._config.rows
        self._version = 0
        generate = partial(generate_rows, checkpoint, self._config.kv_cache)
        self._generate = jax.jit(generate, static_argnames=("capacity", "candidates", "experts"))
        # Guards the queue and the works. It is acquired inside of `_device`, never around it, which excludes deadlocks.
        self._changed = threading.Condition()
        self._device = threading.RLock()  # Serializes batches and weight updates.
        self._works: dict[str, _Work] = {}
        self._queue: list[_Continuation] = []
        self._is_started = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._counts = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0, "compilations": 0}
        self._programs: set[tuple[Any, ...]] = set()
        self._running = 0

    def expect(self, continuations: int) -> None:
        """Fixes the rows of all batches to avoid compilations for smaller ones; see `Engine.expect`."""
        self._rows = min(self._config.rows, 1 << (continuations - 1).bit_length())

    def warm_up(self) -> None:
        """Compiles the programs of every pair of prompt and cache sizes."""
        powers = range(self._checkpoint.max_positions.bit_length() + 1)
        prompts = sorted({self._bucket(1 << power, _SMALLEST_PROMPT) for power in powers})
        for capacity in sorted({self._bucket(1 << power, _SMALLEST_CAPACITY) for power in powers}):
            for bucket in (size for size in prompts if size <= capacity):
                for count in self._prompt_counts(bucket):
                    self._compute([], bucket, capacity, count)

    def start(self) -> None:
        with self._changed:
            self._is_started = True
            # Programs of `warm_up` do not count as compilations of requests.
            self._counts["compilations"] = 0
            self._changed.notify_all()

    def close(self, *, drain_s: float = 0.0) -> None:
        deadline_s = time.monotonic() + drain_s
        with self._changed:
            while self._queue and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._is_closed = True
            queued = self._queue
            self._queue = []
            self._changed.notify_all()
        # Outside of the lock, because receivers may call the engine.
        self._end_all(queued, "abort")

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        limit = self._limit(request)
        with self._changed:
            if self._is_closed:
                raise EngineStopped("The engine was closed and accepts no more requests.")
            if request.request_id in self._works:
                raise GenerationError(f"A request {request.request_id!r} already exists.", parameter="request_id")
            count = request.sampling.n
            work = _Work(request, receive, RequestTimes(submitted_s=time.monotonic()), count)
            self._works[request.request_id] = work
            self._queue += [_Continuation(work, index, limit) for index in range(count)]
            if receive is not None and self._thread is None:
                # A daemon, because an engine that was never closed must not keep the process alive.
                self._thread = threading.Thread(target=self._serve, name="static-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_started or self._is_closed)
            work = self._works.get(request_id)
        if work is None or work.receive is not None:
            raise GenerationError(f"There is no request {request_id!r} to stream.", parameter="request_id")
        # Otherwise a batch of another thread has already computed the request.
        if work.left:
            self._run_queued()
        del self._works[request_id]
        yield from work.updates

    def abort(self, request_id: str) -> None:
        with self._changed:
            ended = [each for each in self._queue if each.work.request.request_id == request_id]
            self._queue = [each for each in self._queue if each not in ended]
        self._end_all(ended, "abort")

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: Literal["keep", "recompute", "abort"] = "keep",
        donate: bool = False,
    ) -> None:
        """Replaces the parameters once no batch is running; parameters missing from `params` keep their values.

        `kv` is ignored, because the cache of a request does not outlive its batch.
        """
        params = _completed(params, self._params) if isinstance(params, Mapping) else params
        self._check_params(params)

        def owned(new: Any, old: Any) -> jax.Array:
            # An entry that `_completed` took from the current parameters.
            if new is old:
                return old
            placed = jax.device_put(new, old.sharding)
            # Copied unless donated, because the caller may overwrite its arrays, for instance in a training step.
            return jnp.array(placed, old.dtype, copy=not donate)

        placed = jax.tree.map(owned, params, self._params)
        with self._device:
            if self._is_closed:
                raise EngineStopped("The engine was closed and accepts no more weights.")
            self._params = placed
            self._version = self._version + 1 if version is None else version

    def stats(self) -> EngineStats:
        with self._changed:
            none = {"used_pages": 0, "pages": 0, "prefix_queries_tokens": 0, "prefix_hits_tokens": 0, "preemptions": 0}
            counts = {**none, **self._counts, "weights_version": self._version}
            return EngineStats(running=self._running, waiting=len(self._queue), **counts)

    def _limit(self, request: GenerationRequest) -> int:
        """Validates a request and returns the maximum number of tokens of each continuation.

        Raises:
          GenerationError: the request cannot be served.
        """
        sampling, positions = request.sampling, self._checkpoint.max_positions
        plain = SamplingParams()
        for name in _UNSUPPORTED:
            if getattr(sampling, name) != getattr(plain, name):
                given = getattr(sampling, name)
                raise GenerationError(
                    f"The static engine does not support {name}={given!r}. Leave it out, or use the engine 'llm' of "
                    "stack-serve.",
                    parameter=name,
                )
        if sampling.logprobs not in (None, 0):
            raise GenerationError(
                f"The static engine does not support logprobs={sampling.logprobs}. Use the engine 'llm' of "
                "stack-serve.",
                parameter="logprobs",
            )
        self._check_tokens("logit_bias", tuple(sampling.logit_bias), MOST_BIASES)
        masked = self._checkpoint.end_tokens if sampling.min_tokens else ()
        self._check_tokens("stop_tokens", (*{*self._stops(sampling), *masked},), MOST_STOP_TOKENS)
        free = positions - len(request.prompt)
        if not request.prompt or free < 1:
            raise GenerationError(
                f"The prompt has {len(request.prompt)} tokens; max_positions is {positions}, one of which the "
                f"continuation needs. Give 1 to {positions - 1} tokens.",
                parameter="prompt",
            )
        if any(not 0 <= token < self._checkpoint.vocab_size for token in request.prompt):
            raise GenerationError(
                f"The prompt has tokens outside of the vocabulary, 0 to {self._checkpoint.vocab_size - 1}.",
                parameter="prompt",
            )
        check_images(request, self._reader)
        return free if sampling.max_tokens is None else min(sampling.max_tokens, free)

    def _check_tokens(self, name: str, tokens: Sequence[int], limit: int) -> None:
        vocab_size = self._checkpoint.vocab_size
        if len(tokens) > limit:
            problem = f"{name} names {len(tokens)} tokens, the model's own end tokens included; give {limit} at most."
        elif any(token >= vocab_size for token in tokens):
            problem = f"{name} has token {max(tokens)}; the model has tokens 0 to {vocab_size - 1}."
        else:
            return
        raise GenerationError(problem, parameter=name)

    def _check_params(self, params: Any) -> None:
        """Raises a ConversionError if the structure or a shape differs from the checkpoint's parameters."""
        wanted = {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(self._params)}
        given = {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
        if wrong := [
            f"{name}: {given.get(name)}, not {wanted.get(name)}"
            for name in sorted(wanted.keys() | given.keys())
            if given.get(name) != wanted.get(name)
        ]:
            raise ConversionError("The new weights do not fit this model:\n  " + "\n  ".join(wrong))

    def _serve(self) -> None:
        """Runs the queue while it has requests with receivers, until the engine is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._is_started and self._has_receivers()))
                if self._is_closed:
                    return
            self._run_queued()

    def _has_receivers(self) -> bool:
        return any(each.work.receive is not None for each in self._queue)

    def _run_queued(self) -> None:
        """Runs the queued continuations in batches, ordered by priority."""
        with self._device:
            with self._changed:
                queued = self._queue
                self._queue = []
                self._running = len(queued)
            # Stable: requests of equal priority run in the order of their arrival.
            queued.sort(key=lambda each: each.work.request.priority)
            for first in range(0, len(queued), self._rows):
                self._run_batch(queued[first : first + self._rows])
            with self._changed:
                self._running = 0
                self._changed.notify_all()

    def _run_batch(self, batch: Sequence[_Continuation]) -> None:
        now_s = time.monotonic()
        late = [each for each in batch if _deadline_s(each.work) < now_s]
        self._end_all(late, "deadline")
        batch = [each for each in batch if each not in late]
        if not batch:
            return
        prompts = [len(each.work.request.prompt) for each in batch]
        bucket = self._bucket(max(prompts), _SMALLEST_PROMPT)
        most = max(tokens + each.limit for tokens, each in zip(prompts, batch, strict=True))
        capacity = self._bucket(most, _SMALLEST_CAPACITY)
        try:
            distinct = len({_prompt_identity(each) for each in batch})
            count = min(each for each in self._prompt_counts(bucket) if each >= distinct)
            found = self._compute(batch, bucket, capacity, count)
        except Exception as error:  # A failure on the device ends only the requests of this batch.
            _LOG.exception("A batch of %d sequences failed", len(batch))
            self._end_all(batch, "error", f"{type(error).__name__}: {error}")
            return
        for row, each in enumerate(batch):
            if found["ok"][row]:
                self._tell(each, self._update(each, {name: values[row] for name, values in found.items()}, now_s))
            else:
                self._end_all([each], "error", "The model's logits are NaN or infinite.")
        self._counts["prompt_tokens"] += sum(prompts)

    def _prompt_counts(self, bucket: int) -> Sequence[int]:
        """Returns the numbers of prompts that a batch may prefill: few, because each compiles another program."""
        counts = [self._rows]
        while bucket >= _SMALLEST_SHARED_PROMPT and counts[-1] >= 4:
            counts.append(counts[-1] // 4)
        return counts

    def _compute(
        self, batch: Sequence[_Continuation], bucket: int, capacity: int, prompts: int
    ) -> dict[str, np.ndarray]:
        """Runs one batch; padding rows have a limit of 0 tokens and finish immediately."""
        candidates = any(each.work.request.sampling.candidates for each in batch)
        experts = any(each.work.request.sampling.experts for each in batch)
        rows = self._filled_rows(batch, bucket, prompts)
        # Mirrors the cache of `jax.jit`, which does not report compilations.
        pixels = rows["images"]["pixels"].shape if "images" in rows else None
        if (program := (bucket, capacity, prompts, candidates, experts, pixels)) not in self._programs:
            self._programs.add(program)
            self._counts["compilations"] += 1
        self._counts["steps"] += 1
        reported = {"candidates": candidates, "experts": experts}
        return jax.device_get(self._generate(self._params, rows, capacity=capacity, **reported))

    def _filled_rows(self, batch: Sequence[_Continuation], bucket: int, prompts: int) -> dict[str, Any]:
        """Returns the inputs of `generate_rows`; with fewer prompts than rows, each distinct prompt has one place."""
        rows, stops = self._rows, [self._stops(each.work.request.sampling) for each in batch]
        # A power of two, because every width of this array compiles one more program.
        most = 1 << max([len(each) for each in stops] + [1]).bit_length()
        arrays: dict[str, Any] = {
            "prompts": np.zeros((prompts, bucket), np.int32),
            # Padding needs a valid last position.
            "prompt_lengths": np.ones(prompts, np.int32),
            "prompt_of_row": np.arange(rows, dtype=np.int32) % prompts,
            "limits": np.zeros(rows, np.int32),
            "stops": np.full((rows, most), -1, np.int32),
            "settings": np.tile(SamplingSettings.greedy_row().packed(), (rows, 1)),
        }
        seeds: list[tuple[int, int]] = []
        places: dict[Hashable, int] = {}
        with_images: dict[int, GenerationRequest] = {}
        for row, each in enumerate(batch):
            prompt, seed = each.work.request.prompt, each.work.request.sampling.seed
            seeds.append((int(np.random.default_rng().integers(1 << 63)) if seed is None else seed, each.index))
            place = places.setdefault(_prompt_identity(each) if prompts < rows else row, len(places))
            if each.work.request.images:
                with_images[place] = each.work.request
            arrays["prompts"][place, : len(prompt)], arrays["prompt_lengths"][place] = prompt, len(prompt)
            arrays["prompt_of_row"][row] = place
            arrays["stops"][row, : len(stops[row])] = stops[row]
            arrays["limits"][row] = each.limit
        arrays["settings"][: len(batch)] = SamplingSettings.packed_rows(
            [each.work.request.sampling for each in batch],
            seeds=seeds,
            end_tokens=self._checkpoint.end_tokens,
            prompt_tokens=[len(each.work.request.prompt) for each in batch],
        )
        if with_images and self._reader is not None:
            arrays["images"] = image_inputs(self._reader, with_images, shape=(prompts, bucket))
        return arrays

    def _stops(self, sampling: SamplingParams) -> list[int]:
        own = () if sampling.ignore_eos else self._checkpoint.end_tokens
        return sorted({*own, *sampling.stop_tokens})

    def _update(self, of: _Continuation, found: dict[str, Any], started_s: float) -> GenerationUpdate:
        request, count = of.work.request, int(found["count"])
        first = len(request.prompt)
        tokens = tuple(int(token) for token in found["history"][first : first + count])
        sampling, stopped = request.sampling, tokens[-1] in self._stops(request.sampling)
        logprobs = None
        if sampling.logprobs is not None:
            values, ranks = found["logprobs"][:count], found["ranks"][:count]
            logprobs = tuple(map(TokenLogprob, tokens, map(float, values), map(int, ranks)))
        shown = tokens[:-1] if stopped and not sampling.include_stop else tokens
        tokenizer = self._checkpoint.tokenizer
        is_own = not sampling.ignore_eos and tokens[-1] in self._checkpoint.end_tokens
        self._counts["generated_tokens"] += count
        ended_s = time.monotonic()
        return GenerationUpdate(
            request_id=request.request_id,
            index=of.index,
            tokens=tokens,
            text="" if tokenizer is None else _text(tokenizer, request, shown),
            weights_versions=(self._version,) * count,
            logprobs=logprobs,
            candidates=candidate_tokens(found["candidates"][:count]) if sampling.candidates else None,
            # A copy, because a slice would keep the arrays of the whole batch in memory.
            experts=found["experts"][: first + count - 1].copy() if sampling.experts else None,
            finish_reason="stop" if stopped else "length",
            stop_reason=tokens[-1] if stopped and not is_own else None,
            times=RequestTimes(of.work.times.submitted_s, started_s, ended_s, ended_s),
        )

    def _end_all(self, continuations: Sequence[_Continuation], reason: FinishReason, error: str | None = None) -> None:
        for each in continuations:
            update = GenerationUpdate(
                request_id=each.work.request.request_id,
                index=each.index,
                finish_reason=reason,
                times=RequestTimes(each.work.times.submitted_s, finished_s=time.monotonic()),
                error=error,
            )
            self._tell(each, update)

    def _tell(self, each: _Continuation, update: GenerationUpdate) -> None:
        work = each.work
        with self._changed:
            work.left -= 1
            if work.receive is None:
                work.updates.append(update)
            elif not work.left:
                del self._works[work.request.request_id]
        # Outside of the lock, as in `close`.
        if work.receive is not None:
            work.receive(update)

    def _bucket(self, tokens: int, smallest: int) -> int:
        return min(max(smallest, 1 << (tokens - 1).bit_length()), self._checkpoint.max_positions)


def _completed(new: Mapping[Any, Any], old: Any) -> Any:
    """Adds the entries of `old` that `new` lacks.

    Unknown entries of `new` stay, because the check that follows rejects them by name.
    """
    if not isinstance(old, Mapping):
        return new
    both = {
        name: _completed(new[name], old[name]) if name in new and isinstance(new[name], Mapping) else old[name]
        for name in old
    }
    return {
        **both,
        **{name: value for name, value in new.items() if name not in old or not isinstance(value, Mapping)},
    }


def _text(tokenizer: Tokenizer, request: GenerationRequest, tokens: Sequence[int]) -> str:
    if request.sampling.skip_special_tokens:
        return tokenizer.decode(tokens)
    detokenizer = IncrementalDetokenizer(tokenizer, request.prompt, skip_special_tokens=False)
    return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])


def _prompt_identity(each: _Continuation) -> Hashable:
    """Returns a key that is equal for equal prompts: the tokens, and the place and digest of each image."""
    request = each.work.request
    return request.prompt, tuple((image.start, image.digest) for image in request.images)


def _deadline_s(work: _Work) -> float:
    timeout_s = work.request.timeout_s
    return float("inf") if timeout_s is None else work.times.submitted_s + timeout_s
