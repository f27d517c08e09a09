"""Creates what an engine keeps for each request, on the thread of the client."""

from collections.abc import Callable

import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, GenerationUpdate
from stack_core.ops.sampling.sampling import SamplingSettings
from stack_serve.llm.adapters import HostAdapter
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler
from stack_serve.llm.drafting import Drafting
from stack_serve.llm.limits import Limits
from stack_serve.llm.logits_processors import open_processors
from stack_serve.llm.output import Ending, Output
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.work import Continuation, Work

__all__ = ["WorkFactory"]

_SEEDS = 2**32


class WorkFactory:
    """Creates the state of requests on the threads of clients.

    Args:
      checkpoint: model to serve.
      config: settings of the engine.
      limits: resolved sizes of the engine.
      drafting: speculation of the engine; None without it.
    """

    def __init__(
        self, checkpoint: GenerativeCheckpoint, config: EngineConfig, limits: Limits, drafting: Drafting | None
    ) -> None:
        self._tokenizer, self._end_tokens = checkpoint.tokenizer, checkpoint.end_tokens
        self._limits, self._drafting = limits, drafting
        self._seeds = np.random.default_rng(config.seed)
        self._processors = open_processors(config.logits_processors)

    def create(
        self,
        request: GenerationRequest,
        receive: Callable[[GenerationUpdate], None],
        adapter: HostAdapter | None = None,
        compiler: ConstraintCompiler | None = None,
    ) -> Work:
        """Creates the state of a request; any thread may call this.

        Args:
          compiler: compiler of the request's constraint, if it has one.
        """
        work = Work(request, receive, adapter, compiler)
        # Client threads share the generator: NumPy's generators lock themselves.
        seed = int(self._seeds.integers(_SEEDS)) if request.sampling.seed is None else request.sampling.seed
        leader: Sequence | None = None
        for index in range(request.sampling.n):
            sequence = self._sequence(work, index, leader)
            # Only the first continuation computes the prompt; the scheduler makes the others wait for its pages.
            leader = leader or sequence
            work.continuations.append(self._continuation(work, sequence, (seed, index)))
        return work

    def _sequence(self, work: Work, index: int, leader: Sequence | None) -> Sequence:
        request = work.request
        return Sequence(
            id=-1,
            request_id=request.request_id,
            index=index,
            tokens=list(request.prompt),
            prompt_tokens=len(request.prompt),
            max_total_tokens=self._limits.total_tokens(request),
            priority=request.priority,
            arrival=-1,
            adapter=None if work.adapter is None else work.adapter.number,
            # Cached pages lack the hidden states from which the log-probabilities of a prompt are computed.
            cacheable=request.sampling.prompt_logprobs is None or index > 0,
            is_constrained=request.sampling.constraint is not None,
            images=request.images,
            leader=leader,
        )

    def _continuation(self, work: Work, sequence: Sequence, seed: tuple[int, int]) -> Continuation:
        request, sampling, end_tokens = work.request, work.request.sampling, self._end_tokens
        settings = SamplingSettings.row(
            sampling, seed=seed, end_tokens=end_tokens, prompt_tokens=sequence.prompt_tokens
        )
        words = np.concatenate([settings.packed(), self._processors.packed(sampling.logits_processors)])
        max_tokens = sequence.max_total_tokens - sequence.prompt_tokens
        ending = Ending(sampling, end_tokens=end_tokens, max_tokens=max_tokens)
        output = Output(request, sequence.index, tokenizer=self._tokenizer)
        matcher = None
        if sampling.constraint is not None:
            assert work.compiler is not None
            matcher = work.compiler.matcher(sampling.constraint)
        drafts = None if self._drafting is None else self._drafting.new_drafter(sequence)
        return Continuation(sequence, words, ending, output, work, matcher, drafts)
