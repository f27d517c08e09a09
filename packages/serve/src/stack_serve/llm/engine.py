"""Generation engine with continuous batching.

The host runs one step ahead: it plans and launches step k + 1 while the devices run step k, and then reads the tokens
of step k. A sequence that ends with a token of step k therefore has a row in step k + 1 too; its tokens are dropped.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from stack_core import ops
from stack_core.abi.adapters import Adapters
from stack_core.abi.engines import Engine, Pooling
from stack_core.abi.errors import ConfigError, EngineBusy, EngineStopped, GenerationError
from stack_core.abi.formats import Dequantizes, GenerativeCheckpoint
from stack_core.abi.generation import Constraint, EngineStats, GenerationRequest, GenerationUpdate
from stack_core.abi.model_formats import open_for_generation
from stack_core.chips.machine import give_memory_back
from stack_serve.llm.compiled_programs import Key, Progress
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler, is_installed
from stack_serve.llm.dispatcher import Dispatcher, End
from stack_serve.llm.draft_model import DraftModel, check_vocabulary
from stack_serve.llm.group_checks import agreed_limits, refusal_over_hosts
from stack_serve.llm.handover import ExportedPages
from stack_serve.llm.limits import Limits
from stack_serve.llm.lockstep import Follower, Leader
from stack_serve.llm.logits_processors import open_processors
from stack_serve.llm.loop import EngineLoop
from stack_serve.llm.memory import describe_memory
from stack_serve.llm.mtp import MtpDrafter, MtpPrograms, programs_class
from stack_serve.llm.new_weights import KeysOfOldWeights, check_params, check_policy
from stack_serve.llm.placement import Placement
from stack_serve.llm.pooling import PoolingPrograms, check_pooling
from stack_serve.llm.programs import Programs
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.served_adapters import ServedAdapters
from stack_serve.llm.work import Continuation, Work

__all__ = ["LLMEngine"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0


class LLMEngine(Engine):
    """The `Engine` "llm": continuous batching of one language model with a paged cache.

    From `start` to `close`, one thread runs the steps and another detokenizes and delivers updates. Requests submitted
    before `start` wait for it. As a context manager, the engine starts on entry and closes on exit.

    Attributes:
      limits: sizes and capabilities against which requests are validated.
      parameters: shapes and dtypes of the parameters.

    Args:
      checkpoint: model to serve.
      config: capacity and scheduling settings; None means the defaults.
      progress: callback of `warm_up` that receives the name of a compiled program, the number of compiled programs and
        the total number of programs.
      group: processes over whose devices the engine is sharded; None means this process. A follower repeats the
        launches of the first process (`follow`) and serves no requests.

    Raises:
      ConfigError: the config is inconsistent with the model, or with a group.
      GenerationError: `config.dequantize` is set, and the checkpoint cannot be read in floating point.
      HardwareError: fewer devices are available than `config.tensor`.
    """

    keeps_missing = True

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        group: Leader | Follower | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        checkpoint = _dequantized(checkpoint) if config.dequantize else checkpoint
        self._adapters = ServedAdapters(checkpoint, config)
        processors = open_processors(config.logits_processors)
        draft = None if config.draft_model is None else open_for_generation(config.draft_model)
        if draft is not None:
            check_vocabulary(checkpoint, draft)
        self.limits = Limits.of(checkpoint, config, draft)
        processors.check(checkpoint.vocab_size, self.limits.max_tokens)
        self._group, self._leader = group, group if isinstance(group, Leader) else None
        if group is not None:
            self.limits = agreed_limits(group, checkpoint, config, self.limits)
        self._max_waiting = config.max_waiting
        self._checkpoint, self.parameters = checkpoint, checkpoint.parameters
        max_tokens, pages = self.limits.max_tokens, self.limits.pages
        sizes = {"max_tokens": max_tokens, "pages": pages}
        constraints = is_installed() and checkpoint.tokenizer is not None
        options: Any = {"adapters": self._adapters.shapes, "constraints": constraints}
        if group is not None:
            placement = Placement(checkpoint.states, config.tensor, jax.devices(), expert=config.expert)
            options |= {"placement": placement, "leader": self._leader}
        self._programs = programs_class(config)(checkpoint, config, **sizes, **options)
        self._proposer: Proposer | None = None
        if isinstance(self._programs, MtpPrograms):
            self._proposer = MtpDrafter(self._programs, checkpoint, config)
        elif draft is not None:
            self._proposer = DraftModel(draft, checkpoint, self._programs, config, **sizes)
        self._pooling = PoolingPrograms(
            checkpoint,
            self._programs.placement,
            lambda: self._programs.params,
            max_tokens=max_tokens,
            batch_tokens=config.step_tokens,
        )
        self._compiles_pooling = config.embeddings
        self._compiler: ConstraintCompiler | None = None
        self._compiler_lock = threading.Lock()
        give_memory_back()  # temporary host memory from loading the parameters
        self._dispatcher = Dispatcher(on_stop=self._stop, on_end=self._forget)
        self._loop = EngineLoop(checkpoint, config, self.limits, self._programs, self._dispatcher.put, self._proposer)
        self._progress = progress
        # Reentrant: `update_weights` runs its update under the lock if the engine was not started.
        self._lock = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._work: dict[str, Work] = {}
        self._accepted = 0
        self._streams: dict[str, tuple[int, queue.SimpleQueue[GenerationUpdate]]] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        # The second is True until the engine thread has freed the memory.
        self._sleeping = self._falls_asleep = False
        self._embedding = 0
        self._failure: BaseException | None = None

    def expect(self, continuations: int) -> None:
        """Lets this many continuations wait, if `max_waiting` is less; see `Engine`."""
        self._max_waiting = max(self._max_waiting, continuations)

    def warm_up(self) -> None:
        """Compiles every program of a step, to keep requests from waiting for compilation."""
        if self._leader is not None:
            self._leader.send(("warm_up",))
        self._programs.compile_all(self._progress)
        for programs in self._all_programs[1:]:
            programs.compile_all()
        self._finish_warm_up()

    def prepare(self) -> None:
        """Compiles one program for each part of a step; the background compiles other sizes.

        On CPUs, where compiled programs take memory from other processes, a size that a larger one can stand in for
        compiles once a step needs it.
        """
        if self._leader is not None:
            self._leader.send(("prepare",))
        self._programs.compile_first(self._progress, if_needed=jax.default_backend() == "cpu")
        for programs in self._all_programs[1:]:
            programs.compile_first()
        self._finish_warm_up()

    def _finish_warm_up(self) -> None:
        if self._compiles_pooling:
            self._pooling.compile_all(self._progress)
        give_memory_back()
        _LOG.info("Memory: %s", self.memory())
        _LOG.info("Pages: %s", self._programs.page_layout)
        for choice in ops.choices():
            _LOG.info("%(op)s %(direction)s %(call)s: %(implementation)s %(config)s, %(reason)s", choice)

    def memory(self) -> str:
        """Returns the memory use of this process by purpose, as human-readable text."""
        return describe_memory(self._programs, self._all_programs[1:], self.limits.pages)

    def follow(self) -> None:
        """Repeats what the first process of the group launches and compiles, until that process ends."""
        compilers = {"prepare": self.prepare, "warm_up": self.warm_up}

        def run(key: Key, *inputs: Any) -> Any:
            return compilers[key[0]]() if key[0] in compilers else self._programs.run(key, *inputs)

        assert isinstance(self._group, Follower)
        self._group.follow(run, self._programs.compile)

    def start(self) -> None:
        """Starts the threads that process requests."""
        self._thread = threading.Thread(target=self._run, name="stack-engine", daemon=True)
        self._dispatcher.start()
        self._thread.start()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` seconds for requests to finish, aborts the remaining ones, and stops the threads."""
        deadline_s = time.monotonic() + drain_s
        with self._lock:
            while self._thread is not None and self._work and (left_s := deadline_s - time.monotonic()) > 0:
                self._lock.wait(left_s)
            was_closing, self._closing = self._closing, True
            self._lock.notify_all()
        for programs in self._all_programs:
            programs.stop_compiling()
        if self._thread is not None:
            self._thread.join()
        # Without a thread, the waiting requests are ended here, and only once: a dispatcher cannot start twice.
        elif not was_closing:
            self._dispatcher.start()
            self._end_all()

    def __enter__(self) -> "LLMEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that requests may select."""
        return self._adapters.names

    def load_adapter(self, name: str, adapters: str | Adapters) -> None:
        """Registers an adapter. It is copied to the devices when the first request that uses it is scheduled.

        An adapter of the same name is replaced; requests submitted earlier keep the old one.

        Args:
          name: name by which requests select the adapter.
          adapters: run trained with adapters, PEFT directory, or the factors themselves.

        Raises:
          GenerationError: the engine was started without adapters, or this adapter would require a recompilation.
          StackError: the adapter cannot be read, or belongs to another model.
        """
        self._adapters.load(name, adapters)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Requests submitted earlier still use it.

        Raises:
          GenerationError: the name is unknown.
        """
        self._adapters.unload(name)

    def check(self, request: GenerationRequest) -> None:
        """Raises a GenerationError that names the invalid parameter if the request cannot be served."""
        self.limits.check(request)
        self._adapters.find(request.adapter)
        if request.sampling.constraint is not None:
            self.compile_constraint(request.sampling.constraint)

    def compile_constraint(self, constraint: Constraint) -> None:
        """Compiles a constraint into the cache of the engine; see `Engine`."""
        self._constraint_compiler().matcher(constraint)

    def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Pooling = "last") -> np.ndarray:
        """Computes the pooled hidden states of prompts on the caller's thread; see `Engine`.

        Each shape of a batch is compiled on first use, or by `warm_up` with `EngineConfig.embeddings`.
        """
        self._refuse_over_hosts("Embeddings")
        check_pooling(pooling)
        for prompt in prompts:
            self.limits.check_input(prompt)
        if not prompts:
            raise GenerationError("No prompts were given; give at least one.", parameter="input")
        with self._lock:
            self._check_awake()
            self._embedding += 1
        try:
            return self._pooling.embed(prompts, pooling)
        finally:
            with self._lock:
                self._embedding -= 1

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the device memory of an idle engine until `wake_up`; see `Engine`."""
        self._refuse_over_hosts("Sleep")
        if level not in (1, 2):
            raise GenerationError(f"level={level!r}: expected 1 or 2.", parameter="level")

        def sleep() -> None:
            # A continuation that was ended by a stop text or its deadline may have steps in flight.
            if self._loop.has_work:
                with self._lock:
                    self._post(sleep)
                return
            self._loop.forget_prefixes()
            for programs in self._all_programs:
                programs.sleep(keep_weights=level == 1)
            with self._lock:
                self._falls_asleep = False
                self._lock.notify_all()

        with self._lock:
            self._check_awake()
            if running := len(self._work) + self._embedding:
                raise EngineBusy(
                    f"{running} requests run. Let them finish, or abort them, before the engine sleeps.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._sleeping = self._falls_asleep = True
            if self._thread is None:
                sleep()
            else:
                self._post(sleep)
            self._wait_until_asleep()
        give_memory_back()

    def wake_up(self) -> None:
        """Allocates the memory again; see `Engine`. The engine thread has no work meanwhile."""
        with self._lock:
            self._check_running()
            # The memory that is about to be freed must not be allocated first.
            self._wait_until_asleep()
            if self._sleeping:
                for programs in self._all_programs:
                    programs.wake_up()
                self._sleeping = False

    def _wait_until_asleep(self) -> None:
        while self._falls_asleep:
            self._check_running()
            self._lock.wait()

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request; see `Engine`.

        Raises:
          GenerationError: the request is invalid, its constraint cannot be compiled, or its id is in use.
          EngineBusy: more than `max_waiting` continuations would wait. If none waits, any request is accepted.
          EngineStopped: the engine was closed or failed.
        """
        # Validation and the work's state are prepared before the lock, which the engine thread takes between steps.
        self.limits.check(request)
        updates = queue.SimpleQueue[GenerationUpdate]()
        compiler = None if request.sampling.constraint is None else self._constraint_compiler()
        adapter = self._adapters.find(request.adapter)
        work = self._loop.work_factory.create(request, receive or updates.put, adapter, compiler)
        with self._lock:
            self._check_awake()
            # A stream may outlive its request: its updates wait until they are read.
            if request.request_id in self._work or request.request_id in self._streams:
                raise GenerationError(
                    f"Request {request.request_id!r} is still in progress. Give each request a unique id.",
                    parameter="request_id",
                )
            # The engine thread updates `done_waiting` without this lock; an old count only overestimates the queue.
            waiting = self._accepted - self._loop.done_waiting
            if waiting and waiting + request.sampling.n > self._max_waiting:
                raise EngineBusy(
                    f"{waiting} continuations wait already; max_waiting={self._max_waiting}. Try again later.",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if receive is None:
                self._streams[request.request_id] = (request.sampling.n, updates)
            self._work[request.request_id] = work
            self._accepted += request.sampling.n
            self._post(lambda: self._loop.begin(work))
        self._dispatcher.watch(work)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request; see `Engine`. Closing the iterator early aborts the request.

        Raises:
          GenerationError: no request of this id was submitted without `receive`, or it was streamed already.
        """
        if request_id not in self._streams:
            raise GenerationError(f"No request {request_id!r} was submitted for streaming, or it was streamed already.")
        unfinished, updates = self._streams[request_id]
        try:
            while unfinished:
                update = updates.get()
                unfinished -= update.finish_reason is not None
                yield update
        finally:
            self.abort(request_id)
            with self._lock:
                self._streams.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Aborts a request before its next step; has no effect on a finished request."""
        with self._lock:
            work = self._work.get(request_id)
            if work is not None:
                self._post(lambda: self._loop.end(work, "abort"))

    def update_weights(
        self, params: Any, *, version: int | None = None, kv: KeysOfOldWeights = "keep", donate: bool = False
    ) -> None:
        """Replaces the parameters between two steps and keeps those missing from `params`; see `Engine`.

        Raises:
          GenerationError: `kv` has an unknown value.
        """
        check_policy(kv)
        self.use_weights(self.place_weights(params, donate=donate), version=version, kv=kv)

    def place_weights(self, params: Any, *, donate: bool = False) -> Mapping[str, Any]:
        """Checks new parameters and copies them to the devices on the caller's thread, for `use_weights`.

        Steps continue with the old parameters meanwhile. See `Engine.update_weights`.

        Returns:
          Placed parameters by path.
        """
        self._refuse_over_hosts("New weights")
        check_params(params, self.parameters)
        with self._lock:
            self._check_awake()
        return self._programs.place(params, donate=donate)

    def use_weights(self, params: Mapping[str, Any], *, version: int | None, kv: KeysOfOldWeights) -> None:
        """Replaces parameters between two steps by those of `place_weights`; see `Engine.update_weights`."""
        done = threading.Event()

        def update() -> None:
            self._loop.update_weights(params, version=version, kv=kv)
            with self._lock:
                done.set()
                self._lock.notify_all()

        with self._lock:
            self._check_awake()  # again, because it may have begun to sleep during the copy
            if self._thread is None:
                return update()
            self._post(update)
            # A failed or closed engine never runs the update, so each wake-up checks for both.
            while not done.is_set():
                self._check_running()
                self._lock.wait()
        return None

    def prepare_handover(self) -> None:
        """Compiles the programs that hand pages over to other engines.

        Raises:
          ConfigError: the engine has no prefix cache, or a draft model, which would lack the keys.
        """
        has_draft_model = len(self._all_programs) > 1
        if not self.limits.prefix_caching or has_draft_model:
            reason = "a draft model" if has_draft_model else "no prefix cache, or a recurrent model"
            raise ConfigError(f"Keys cannot be handed over to an engine with {reason}. Leave out prefill_engines.")
        self._programs.compile_handover()

    def export_pages(self, request: GenerationRequest) -> ExportedPages:
        """Copies the cached pages of a prompt for another engine, after a request with this prompt."""
        adapter = self._adapters.find(request.adapter)
        number = None if adapter is None else adapter.number
        return self._between_steps(lambda: self._loop.export_pages(request, number))

    def import_pages(self, request: GenerationRequest, exported: ExportedPages) -> None:
        """Adds pages of another engine to the prefix cache, as many as fit, before the request is submitted."""
        adapter = self._adapters.find(request.adapter)
        number = None if adapter is None else adapter.number
        self._between_steps(lambda: self._loop.import_pages(request, number, exported))

    def _between_steps(self, action: Callable[[], T]) -> T:
        """Runs an action on the engine thread and returns its result."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # the caller raises it, and the engine runs on
                future.set_exception(error)
            with self._lock:
                self._lock.notify_all()

        with self._lock:
            self._check_awake()
            self._post(run)
            # A failed or closed engine never runs the action, so each wake-up checks for both.
            while not future.done():
                self._check_running()
                self._lock.wait()
        return future.result()

    def stats(self) -> EngineStats:
        """Returns the counters as of the last step.

        Raises:
          EngineStopped: the engine failed.
        """
        if self._failure is not None:
            self._check_running()
        to_compile = sum(programs.to_compile for programs in self._all_programs)
        version = self._loop.weights_version
        return dataclasses.replace(self._loop.stats, programs_to_compile=to_compile, weights_version=version)

    @property
    def _all_programs(self) -> list[Programs]:
        return [self._programs, *([] if self._proposer is None else self._proposer.separate_programs)]

    def _constraint_compiler(self) -> ConstraintCompiler:
        """Returns the compiler of constraints, made at the first use, because it reads the whole vocabulary."""
        with self._compiler_lock:
            if self._compiler is None:
                checkpoint = self._checkpoint
                if checkpoint.tokenizer is None:
                    raise GenerationError(
                        f"{checkpoint.name} has no tokenizer, which constraints need. Leave the constraint out.",
                        parameter="constraint",
                    )
                self._compiler = ConstraintCompiler(checkpoint.tokenizer, checkpoint.vocab_size, checkpoint.end_tokens)
            return self._compiler

    def _refuse_over_hosts(self, feature: str) -> None:
        if self._group is not None:
            raise GenerationError(refusal_over_hosts(feature))

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._lock.notify_all()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"The engine failed: {self._failure}. Start another; see its log for the cause.")
        if self._closing:
            raise EngineStopped("The engine was closed. Start another.")

    def _check_awake(self) -> None:
        self._check_running()
        if self._sleeping:
            raise GenerationError("The engine sleeps. Wake it up first (wake_up).", parameter="engine")

    def _run(self) -> None:
        try:
            self._loop.start()
            while self._do_posted():
                self._loop.turn()
        except BaseException as error:
            # Catches any error of a device or of XLA: waiting clients must get it, and no further step can run.
            with self._lock:
                self._failure = error if self._leader is None else self._leader.explain(error)
            raise
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Ends every accepted request and refuses new ones."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            left = list(self._work.values())
        self._loop.flush()  # delivers tokens already read, which may end some requests normally
        reason, error = ("abort", None) if self._failure is None else ("error", f"The engine failed: {self._failure}")
        for work in left:
            self._dispatcher.put([End(continuation, reason, error) for continuation in work.continuations])
        self._dispatcher.close()

    def _do_posted(self) -> bool:
        """Waits for work, runs the posted actions, and returns False once the engine is closing."""
        with self._lock:
            while not (self._inbox or self._loop.has_work or self._closing):
                self._lock.wait()
            inbox, self._inbox = self._inbox, list[Callable[[], None]]()
        # Without the lock, since actions may run long and `submit` must not wait.
        for action in inbox:
            action()
        return not self._closing

    def _stop(self, continuation: Continuation) -> None:
        """Stops the generation of a continuation that was ended by a stop text or its deadline."""
        with self._lock:
            self._post(lambda: self._loop.stop(continuation))

    def _forget(self, work: Work) -> None:
        with self._lock:
            self._work.pop(work.request.request_id, None)
            self._lock.notify_all()


def _dequantized(checkpoint: GenerativeCheckpoint) -> GenerativeCheckpoint:
    if not isinstance(checkpoint, Dequantizes):
        raise GenerationError(f"{checkpoint.name} cannot be read in floating point. Leave out dequantize.")
    return checkpoint.dequantized()
