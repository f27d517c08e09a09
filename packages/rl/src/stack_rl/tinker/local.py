"""`LocalClient`: adapters of one model, trained and sampled from in this process by the calls of the Tinker API."""

import itertools
import re
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import jax.numpy as jnp
import numpy as np

from stack_core.abi.adapters import LowRankFactors
from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import ArgumentError, CheckpointError, ConfigError, GenerationError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.plugins import registries
from stack_rl.tinker.adapters import AdaptedCheckpoint, as_adapters, new_factors, targets_of
from stack_rl.tinker.datums import Datum, token_list
from stack_rl.tinker.training import AdamParams, AdapterState, AdapterTrainer, ForwardBackwardOutput, LoraSettings

__all__ = ["LocalClient", "SampleOutput", "SampledSequence", "SamplingClient", "TrainingClient"]

T = TypeVar("T")

_ENGINE: Final = "llm"
_SCHEME: Final = "tinker://"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHTS, _SAMPLER = "weights", "sampler_weights"


@dataclass(frozen=True)
class SampledSequence:
    """A continuation.

    Attributes:
      tokens: sampled tokens, including the stop token or stop text.
      logprobs: log-probability of each token under the sampling distribution, or at temperature 0 under the model's
        distribution.
      stop_reason: "stop" or "length".
      topk_logprobs: most likely (token, log-probability) pairs at each position, if requested.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    topk_logprobs: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True)
class SampleOutput:
    """Continuations of a prompt.

    Attributes:
      sequences: the continuations.
      prompt_logprobs: log-probability of each prompt token, None for the first, if requested.
      topk_prompt_logprobs: most likely pairs at each prompt token, if requested.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float | None] = ()
    topk_prompt_logprobs: Sequence[Sequence[tuple[int, float]]] = ()


class LocalClient:
    """Adapters of one base model, trained and sampled from in this process.

        client = LocalClient("runs/chat")
        training = client.create_lora_training_client(rank=8)
        training.forward_backward(data, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-3)).result()
        sampler = training.save_weights_and_get_sampling_client()

    The methods have the names and semantics of the Tinker SDK's `ServiceClient`, `TrainingClient` and `SamplingClient`.
    Training calls return futures. They run in the order of the calls, on one thread for all adapters, and share the
    base's parameters with the engine. The engine samples concurrently, with the adapter of each client.

    Args:
      model: address of the base model, as for `stack generate`; its parameters are not quantized.
      max_rank: maximum rank of adapters, for which the engine's programs are compiled.
      directory: directory of saved adapters, created by the first save.
      model_name: name of the base model for clients; None is the checkpoint's name.

    Raises:
      StackError: the model cannot be read, or cannot have adapters.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_rank: int = 32,
        directory: str | Path = "tinker",
        model_name: str | None = None,
    ) -> None:
        if max_rank < 1:
            raise ConfigError(f"max_rank is {max_rank}; it must be at least 1.")
        self.checkpoint = open_for_generation(str(model))
        self.base_model = model_name or self.checkpoint.name
        self.max_rank, self.directory = max_rank, Path(directory)
        self.targets = targets_of(self.checkpoint)
        self._shared: Any = AdaptedCheckpoint(self.checkpoint, rank=max_rank)
        self.trainer = AdapterTrainer(self.checkpoint, self._shared.params)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stack-tinker")
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._is_closed = False

    def __enter__(self) -> "LocalClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for running training calls, cancels queued ones, and stops the engine."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)
        with self._lock:
            if self._engine is not None:
                self._engine.close()

    @property
    def engine(self) -> Engine:
        """The engine, started by the first use.

        Raises:
          UnknownName: stack-serve, which has the engine, is not installed.
          EngineStopped: the client was closed.
        """
        with self._lock:
            if self._engine is None:
                self._engine = checked_engine(_ENGINE, registries.engines[_ENGINE](self._shared))
                self._engine.start()
                if self._is_closed:
                    self._engine.close()
            return self._engine

    def create_lora_training_client(
        self,
        rank: int = 32,
        *,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        model_id: str | None = None,
    ) -> "TrainingClient":
        """Creates an adapter that leaves the base unchanged.

        Raises:
          ConfigError: the rank exceeds `max_rank`, or nothing would be trained.
        """
        lora = LoraSettings(rank=rank, train_attn=train_attn, train_mlp=train_mlp)
        self._check_rank(rank)
        if not (train_attn or train_mlp):
            raise ConfigError("Nothing would be trained. Set train_attn or train_mlp.")
        seed = secrets.randbits(32) if seed is None else seed
        factors = new_factors(self.targets, rank=rank, seed=seed, train_attn=train_attn, train_mlp=train_mlp)
        return TrainingClient(self, model_id or self._new_name(), AdapterState.of(lora, factors))

    def create_training_client_from_state(
        self, path: str, *, optimizer: bool = False, model_id: str | None = None
    ) -> "TrainingClient":
        """Creates an adapter from a path that `save_state` returned; `optimizer` also restores the optimizer.

        Raises:
          CheckpointError: the adapter does not exist or belongs to another model.
        """
        state = self.read(path, optimizer=optimizer)
        return TrainingClient(self, model_id or self._new_name(), state)

    def create_sampling_client(self, model_path: str | None = None) -> "SamplingClient":
        """Returns a client that samples from saved weights, or from the base model if `model_path` is None.

        Raises:
          CheckpointError: the weights do not exist.
          UnknownName: stack-serve is not installed.
        """
        if model_path is None:
            return SamplingClient(self, None)
        return self.sampler_of(self.read(model_path, optimizer=False))

    def sampler_of(self, state: AdapterState) -> "SamplingClient":
        """Returns a client that samples from a snapshot of an adapter."""
        name = self._new_name()
        adapters: Mapping[str, LowRankFactors] = as_adapters(state.factors, state.lora.scale)
        engine = self.engine
        engine.load_adapter(name, adapters)
        sampler = SamplingClient(self, name)
        # A loop that samples after each step creates thousands of samplers, so the engine unloads the adapter of each
        # deleted sampler. Requests in flight keep the adapter.
        weakref.finalize(sampler, engine.unload_adapter, name)
        return sampler

    def in_order(self, call: Callable[..., T], *args: Any, **options: Any) -> "Future[T]":
        """Runs a call after all earlier training calls."""
        return self._thread.submit(call, *args, **options)

    def save(self, state: AdapterState, model_id: str, kind: str, name: str, *, overwrite: bool) -> str:
        """Writes an adapter and returns its path.

        Raises:
          ArgumentError: the name is not a plain file name.
          CheckpointError: the name is in use.
        """
        if not _NAME.fullmatch(name):
            raise ArgumentError(f"{name!r} is not a name for weights. Use letters, digits, '.', '_' and '-'.")
        path = f"{_SCHEME}{model_id}/{kind}/{name}"
        directory = self._directory_of(path)
        if not directory.exists():
            state.save(directory)
        elif overwrite:
            # The former weights are deleted only after the new ones are complete. Names never begin with a dot.
            new = directory.with_name(f".{directory.name}")
            shutil.rmtree(new, ignore_errors=True)
            state.save(new)
            shutil.rmtree(directory)
            new.rename(directory)
        else:
            raise CheckpointError(f"{path} exists already. Choose another name, or set overwrite.")
        return path

    def read(self, path: str, *, optimizer: bool) -> AdapterState:
        """Reads the adapter at a path that `save` returned.

        Raises:
          CheckpointError: the adapter does not exist, belongs to another model, or exceeds `max_rank`.
        """
        directory = self._directory_of(path)
        if not directory.is_dir():
            raise CheckpointError(f"There are no weights at {path}: {directory} does not exist.")
        state = AdapterState.load(directory, self.targets, optimizer=optimizer)
        self._check_rank(state.lora.rank)
        return state

    def _check_rank(self, rank: int) -> None:
        if rank > self.max_rank:
            raise ConfigError(
                f"The adapter has rank {rank}; the maximum is {self.max_rank}. Raise max_rank, or lower it."
            )

    def _directory_of(self, path: str) -> Path:
        """Returns the directory of saved weights.

        Raises:
          CheckpointError: the path does not have the form of `save`'s.
        """
        model_id, *rest = path.removeprefix(_SCHEME).split("/")
        parts = [*model_id.split(":"), *rest]
        if not path.startswith(_SCHEME) or len(rest) != 2 or not all(map(_NAME.fullmatch, parts)):
            raise CheckpointError(f"{path!r} is not a path of weights; expected {_SCHEME}MODEL/{_WEIGHTS}/NAME.")
        return self.directory.joinpath("-".join(model_id.split(":")), *rest)

    def _new_name(self) -> str:
        return f"local-{secrets.token_hex(4)}-{next(self._numbers)}"


@dataclass(frozen=True)
class TrainingClient:
    """Trains one adapter; see `LocalClient`.

    Attributes:
      model_id: identifier of the adapter.
    """

    service: LocalClient = field(repr=False)
    model_id: str
    _state: AdapterState = field(repr=False)

    @property
    def rank(self) -> int:
        return self._state.lora.rank

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> "Future[ForwardBackwardOutput]":
        """Adds the gradient of a named loss, summed over the tokens of all data, to the adapter's gradient.

        `cross_entropy` reads `weights`; `importance_sampling`, `ppo`, `cispo` and `dro` read `logprobs` and
        `advantages`. All read `target_tokens`.

        Raises, by the future:
          DataError: the loss is unknown, or its inputs in a datum are invalid.
        """
        trainer = self.service.trainer
        return self.service.in_order(trainer.forward_backward, self._state, list(data), loss_fn, loss_fn_config)

    def forward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> "Future[ForwardBackwardOutput]":
        """Computes a loss without its gradient."""
        trainer, config = self.service.trainer, loss_fn_config
        return self.service.in_order(trainer.forward_backward, self._state, list(data), loss_fn, config, backward=False)

    def forward_backward_custom(
        self, data: Sequence[Any], loss_fn: Callable[[Sequence[Any], list[Any]], tuple[Any, Mapping[str, Any]]]
    ) -> "Future[ForwardBackwardOutput]":
        """Adds the gradient of a JAX function of the data and of their log-probabilities, a list of float32[tokens].

        The function returns the loss and metrics. It costs one more forward pass.
        """
        return self.service.in_order(self._custom, list(data), loss_fn)

    def _custom(self, data: Sequence[Any], loss_fn: Callable[..., Any]) -> ForwardBackwardOutput:
        import jax

        trainer = self.service.trainer

        def weighted(weights: Sequence[Any]) -> list[Datum]:
            pairs = zip(data, weights, strict=True)
            return [
                Datum(each.model_input, {"target_tokens": each.loss_fn_inputs["target_tokens"], "weights": weight})
                for each, weight in pairs
            ]

        zeros = [np.zeros(len(token_list(each.model_input)), np.float32) for each in data]
        found = trainer.forward_backward(self._state, weighted(zeros), "cross_entropy", backward=False)
        logprobs = [jnp.asarray(each["logprobs"]) for each in found.loss_fn_outputs]
        (loss, metrics), slopes = jax.value_and_grad(lambda values: loss_fn(data, values), has_aux=True)(logprobs)
        # Linearize the loss: the sum of log-probabilities weighted by its slopes has the same gradient.
        linear = weighted([-np.asarray(each) for each in slopes])
        output = trainer.forward_backward(self._state, linear, "cross_entropy")
        numbers = {name: float(value) for name, value in metrics.items()}
        return ForwardBackwardOutput(output.loss_fn_outputs, {**numbers, "loss:sum": float(loss)})

    def optim_step(self, adam_params: AdamParams | None = None) -> "Future[Mapping[str, float]]":
        """Applies AdamW to the accumulated gradient, resets the gradient, and returns metrics.

        Raises, by the future:
          TrainingError: no gradient was accumulated, or it is not finite.
        """
        adam = AdamParams() if adam_params is None else adam_params
        return self.service.in_order(self.service.trainer.optim_step, self._state, adam)

    def save_state(self, name: str, *, overwrite: bool = False) -> "Future[str]":
        """Saves the adapter with its optimizer; returns the path."""
        return self._save(_WEIGHTS, name, overwrite)

    def load_state(self, path: str, *, optimizer: bool = False) -> "Future[None]":
        """Replaces the adapter by a saved one and discards its gradient."""

        def load() -> None:
            vars(self._state).update(vars(self.service.read(path, optimizer=optimizer)))

        return self.service.in_order(load)

    def save_weights_for_sampler(self, name: str) -> "Future[str]":
        """Saves the adapter for `LocalClient.create_sampling_client`; returns the path."""
        return self._save(_SAMPLER, name, overwrite=False)

    def save_weights_and_get_sampling_client(self) -> "SamplingClient":
        """Waits for all earlier calls, then returns a client that samples from a snapshot of the adapter."""
        return self.service.in_order(self.snapshot).result()

    def snapshot(self) -> "SamplingClient":
        """Returns a client that samples from a snapshot of the adapter, without waiting for earlier calls."""
        return self.service.sampler_of(self._state)

    def _save(self, kind: str, name: str, overwrite: bool) -> "Future[str]":
        return self.service.in_order(self.service.save, self._state, self.model_id, kind, name, overwrite=overwrite)


@dataclass(frozen=True)
class SamplingClient:
    """Samples from a snapshot of one adapter, or from the base model; see `LocalClient`.

    Attributes:
      adapter: the adapter's name in the engine; None is the base.
    """

    service: LocalClient = field(repr=False)
    adapter: str | None

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> "Future[SampleOutput]":
        """Samples continuations of a prompt.

        Args:
          prompt: token ids.
          num_samples: number of continuations.
          sampling_params: sampling settings; by default, the model's distribution up to an end token.
          include_prompt_logprobs: True also returns the log-probabilities of the prompt.
          topk_prompt_logprobs, topk_sample_logprobs: numbers of most likely tokens to return at each position.

        Raises:
          GenerationError: the engine cannot serve the request.
          EngineBusy: too many requests wait.
        """
        given = SamplingParams() if sampling_params is None else sampling_params
        changes: dict[str, Any] = {
            "n": num_samples,
            "logprobs": topk_sample_logprobs,
            "logprobs_of": "processed" if given.temperature > 0 else "model",
            "include_stop": True,
        }
        wants_prompt = include_prompt_logprobs or topk_prompt_logprobs > 0
        if wants_prompt:
            changes["prompt_logprobs"] = topk_prompt_logprobs
        sampling = SamplingParams(**(vars(given) | changes))
        request = GenerationRequest(
            request_id=secrets.token_hex(12), prompt=tuple(token_list(prompt)), sampling=sampling, adapter=self.adapter
        )
        waiting = _Sampling(num_samples, topk_prompt_logprobs if wants_prompt else None, topk_sample_logprobs)
        self.service.engine.submit(request, waiting.receive)
        return waiting.future

    def compute_logprobs(self, prompt: Any) -> "Future[Sequence[float | None]]":
        """Computes the log-probability of each token of a prompt, None for the first."""
        found: Future[Sequence[float | None]] = Future()
        sampled = self.sample(prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True)

        def copy_result(finished: "Future[SampleOutput]") -> None:
            if (error := finished.exception()) is not None:
                found.set_exception(error)
            else:
                found.set_result(finished.result().prompt_logprobs)

        sampled.add_done_callback(copy_result)
        return found


class _Sampling:
    """Collects the updates of a request until its last one."""

    def __init__(self, count: int, top_prompt: int | None, top: int) -> None:
        self.future: Future[SampleOutput] = Future()
        self._updates: list[list[GenerationUpdate]] = [[] for _ in range(count)]
        self._left, self._top_prompt, self._top = count, top_prompt, top

    def receive(self, update: GenerationUpdate) -> None:
        self._updates[update.index].append(update)
        self._left -= update.finish_reason is not None
        if self._left == 0 and not self.future.done():
            try:
                self.future.set_result(self._output())
            except GenerationError as error:
                self.future.set_exception(error)

    def _output(self) -> SampleOutput:
        prompts = [each.prompt_logprobs for each in self._updates[0] if each.prompt_logprobs is not None]
        prompt = () if self._top_prompt is None or not prompts else prompts[0]
        return SampleOutput(
            [self._sequence(each) for each in self._updates],
            [None if each is None else each.logprob for each in prompt],
            [() if each is None else each.top for each in prompt] if self._top_prompt else (),
        )

    def _sequence(self, updates: Sequence[GenerationUpdate]) -> SampledSequence:
        reason = updates[-1].finish_reason
        if reason not in ("stop", "length"):
            detail = updates[-1].error or "the engine gave no reason"
            raise GenerationError(f"The request ended with {reason!r}: {detail}.")
        parts = [part for each in updates for part in each.logprobs or ()]
        return SampledSequence(
            [token for each in updates for token in each.tokens],
            [each.logprob for each in parts],
            reason,
            [each.top for each in parts] if self._top else (),
        )
