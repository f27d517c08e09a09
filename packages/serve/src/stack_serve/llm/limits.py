"""Limits of an engine, and the validation of requests before they are queued."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.abi.caches import Recurrent
from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.chips.memory import free_bytes
from stack_core.ops.building import holds_values
from stack_core.ops.sampling.logprobs import MOST_LOGPROBS
from stack_core.ops.sampling.sampling import MOST_BIASES, MOST_STOP_TOKENS
from stack_core.text.image_prompts import check_images
from stack_core.text.images import ImageReader, image_reader_of
from stack_serve.llm.cache import empty_layers, supports_shared_pool
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig
from stack_serve.llm.logits_processors import open_processors
from stack_serve.llm.mtp_step import cached_states

__all__ = ["Limits"]

_MOST_CONTINUATIONS = 128
# Fractions of the free memory for the cache without `memory_fraction`.
_DEVICE_FRACTION = 0.5
_CPU_FRACTION, _MOST_CPU_BYTES = 0.25, 2**31


@dataclass(frozen=True)
class Limits:
    """Sizes and capabilities of an engine, against which requests are validated.

    Attributes:
      max_tokens: maximum total length of a prompt and its continuation.
      pages: number of cache pages.
      vocab_size: number of tokens in the vocabulary.
      end_tokens: number of end tokens of the model.
      has_tokenizer: True if the model has a tokenizer, which stop texts and constraints require.
      priorities: True if requests may set a priority.
      prefix_caching: True if later requests can reuse the pages of a prompt with the same prefix.
      image_reader: preprocessing of images, which defines their shapes; None for a model of text.
      logits_processors: logits processors that requests may select.
    """

    max_tokens: int
    pages: int
    vocab_size: int
    end_tokens: int
    has_tokenizer: bool
    priorities: bool = False
    prefix_caching: bool = True
    image_reader: ImageReader | None = None
    logits_processors: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, checkpoint: GenerativeCheckpoint, config: EngineConfig, draft: GenerativeCheckpoint | None = None
    ) -> "Limits":
        """Resolves the sizes of a config, with defaults from the model and the free memory.

        Args:
          checkpoint: model to serve.
          config: settings of the engine.
          draft: model of `config.draft_model`, whose parameters and pages take memory, too.

        Raises:
          ConfigError: the sizes are inconsistent with each other or with the model.
        """
        max_tokens = checkpoint.max_positions if config.max_tokens is None else config.max_tokens
        if max_tokens > checkpoint.max_positions:
            raise ConfigError(
                f"max_tokens={max_tokens} is more than the {checkpoint.max_positions} positions of model "
                f"{checkpoint.name!r}. Lower it, or omit it to use all of them."
            )
        if (
            config.page_layout is not None
            and holds_values(config.page_layout)
            and not supports_shared_pool(checkpoint.states)
        ):
            raise ConfigError(
                f"page_layout={config.page_layout!r} stores keys and values of equal width in one pool; model "
                f"{checkpoint.name!r} has latents, or values of another width. Leave it out."
            )
        models = (checkpoint, *([] if draft is None else [draft]))
        recurrent = next(filter(_is_recurrent, models), None)
        if config.speculation is not None and recurrent is not None:
            raise ConfigError(
                f"speculation: model {recurrent.name!r} has recurrent states, which cannot be rewound to the token "
                "before a rejected draft. Leave it out."
            )
        states = [cached_states(checkpoint, config), *(model.states for model in models[1:])]
        reader = image_reader_of(checkpoint)
        image_tokens = 0 if reader is None else reader.sizes[-1]
        # Causal images may be divided between steps.
        is_whole = reader is not None and reader.layout == "whole"
        if is_whole and config.step_tokens < config.max_sequences + image_tokens:
            raise ConfigError(
                f"step_tokens={config.step_tokens} is less than an image of {image_tokens} tokens and a token of each "
                f"of max_sequences={config.max_sequences} sequences. Raise step_tokens to at least "
                f"{config.max_sequences + image_tokens}, or lower max_sequences."
            )
        needed = -(-max_tokens // config.page_tokens)
        pages = config.pages or min(needed * config.max_sequences, max(needed, _fitting_pages(models, states, config)))
        if pages < needed:
            raise ConfigError(
                f"pages={pages} of {config.page_tokens} tokens hold {pages * config.page_tokens} tokens; one sequence "
                f"may have {max_tokens}. Give at least {needed} pages, or lower max_tokens."
            )
        return cls(
            max_tokens,
            pages,
            checkpoint.vocab_size,
            len(checkpoint.end_tokens),
            checkpoint.tokenizer is not None,
            config.priorities > 0,
            _keeps_prefixes(checkpoint, config),
            reader,
            config.logits_processors,
        )

    def total_tokens(self, request: GenerationRequest) -> int:
        """Returns the maximum total length of the prompt and one continuation."""
        wanted = request.sampling.max_tokens
        return self.max_tokens if wanted is None else len(request.prompt) + wanted

    def check(self, request: GenerationRequest) -> None:
        """Raises a GenerationError that names the parameter if the request cannot be served."""
        self._check_prompt(request)
        check_images(request, self.image_reader)
        self._check_sampling(request.sampling)
        if request.timeout_s is not None and not request.timeout_s > 0:  # also rejects NaN
            raise GenerationError(f"timeout_s={request.timeout_s}: expected a positive time.", parameter="timeout_s")
        if request.priority and not self.priorities:
            raise GenerationError(
                f"priority={request.priority}: this engine does not accept priorities. Leave it out, or start the "
                "engine with priorities=10 (stack serve --priorities 10), which allows -10 to 10.",
                parameter="priority",
            )

    def check_input(self, prompt: Sequence[int]) -> None:
        """Raises a GenerationError if a prompt without a continuation cannot be computed."""
        self._check_tokens(prompt)
        if len(prompt) > self.max_tokens:
            raise GenerationError(
                f"The prompt has {len(prompt)} tokens; the maximum is {self.max_tokens}. Shorten it.",
                parameter="prompt",
            )

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        if not len(prompt):
            raise GenerationError("The prompt has no tokens; at least one is needed.", parameter="prompt")
        # min and max run in C; a Python loop over a long prompt would block the event loop of a server.
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise GenerationError(
                f"The prompt has token {bad}; the model has tokens 0 to {self.vocab_size - 1}.", parameter="prompt"
            )

    def _check_prompt(self, request: GenerationRequest) -> None:
        tokens = len(request.prompt)
        self._check_tokens(request.prompt)
        if tokens >= self.max_tokens:
            raise GenerationError(
                f"The prompt has {tokens} tokens; the maximum for prompt and continuation is {self.max_tokens}. "
                f"Shorten the prompt to at most {self.max_tokens - 1} tokens.",
                parameter="prompt",
            )
        if self.total_tokens(request) > self.max_tokens:
            raise GenerationError(
                f"The prompt's {tokens} tokens and max_tokens={request.sampling.max_tokens} exceed the maximum of "
                f"{self.max_tokens} for prompt and continuation. Request at most {self.max_tokens - tokens}.",
                parameter="max_tokens",
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_count("n", sampling.n, _MOST_CONTINUATIONS, "continuations")
        max_logprobs = min(MOST_LOGPROBS, self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_count(name, getattr(sampling, name) or 0, max_logprobs, "most likely tokens")
        self._check_count("logit_bias", len(sampling.logit_bias), MOST_BIASES, "tokens")
        # End tokens share the device's table with stop tokens; `min_tokens` masks them even with `ignore_eos`.
        ends = 0 if sampling.ignore_eos and not sampling.min_tokens else self.end_tokens
        self._check_count("stop_tokens", len(sampling.stop_tokens), MOST_STOP_TOKENS - ends, "tokens")
        for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_tokens", sampling.stop_tokens)):
            if any(token >= self.vocab_size for token in tokens):
                raise GenerationError(
                    f"{name} has token {max(tokens)}; the model has tokens 0 to {self.vocab_size - 1}.", parameter=name
                )
        if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
            raise GenerationError(
                f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}. Lower it.",
                parameter="min_tokens",
            )
        if sampling.stop and not self.has_tokenizer:
            raise GenerationError(
                "Stop texts need a tokenizer; the model has none. Give stop_tokens.", parameter="stop"
            )

        if sampling.experts:
            raise GenerationError(
                "The engine 'llm' does not report experts. Leave it out, or use the engine 'static' of stack-train.",
                parameter="experts",
            )
        if sampling.constraint is not None and not self.has_tokenizer:
            raise GenerationError(
                "A constraint needs a tokenizer, since it describes text; the model has none. Leave it out.",
                parameter="constraint",
            )
        if sampling.logits_processors:
            open_processors(self.logits_processors).packed(sampling.logits_processors)

    def _check_count(self, name: str, count: int, maximum: int, unit: str) -> None:
        if count > maximum:
            raise GenerationError(f"{name}: {count} {unit} were requested; the maximum is {maximum}.", parameter=name)


def _keeps_prefixes(checkpoint: GenerativeCheckpoint, config: EngineConfig) -> bool:
    """Resolves `prefix_caching`; raises a ConfigError if it is True for a model with recurrent states."""
    is_recurrent = _is_recurrent(checkpoint)
    if is_recurrent and config.prefix_caching:
        raise ConfigError(
            f"prefix_caching=True: model {checkpoint.name!r} has recurrent states, which cannot be "
            "rewound to the token where another prompt diverges. Leave it out."
        )
    return not is_recurrent and config.prefix_caching is not False


def _is_recurrent(checkpoint: GenerativeCheckpoint) -> bool:
    return any(isinstance(state, Recurrent) for state in jax.tree.leaves(checkpoint.states))


def _fitting_pages(models: Sequence[GenerativeCheckpoint], states: Sequence[Any], config: EngineConfig) -> int:
    """Returns the number of pages, with the states of all models, that fit in the memory that the cache may use."""

    def cache_bytes(pages: int) -> int:
        # One more slot for padding rows.
        sizes = {"page_tokens": config.page_tokens, "slots": config.max_sequences + 1}
        kind: Any = {"layout": config.page_layout or ANY_LAYOUT, "dtype": config.cache_dtype}
        make = lambda: [empty_layers(each, pages=pages, **sizes, **kind) for each in states]
        return _size_bytes(jax.eval_shape(make))

    # The pools grow linearly with the number of pages, so two sizes suffice.
    states_bytes, page_bytes = cache_bytes(0), cache_bytes(1) - cache_bytes(0)
    devices = config.tensor * config.expert
    device_bytes = free_bytes(jax.local_devices()[:devices])
    unlimited = 2**30  # the caller then uses the pages needed for `max_sequences`
    if device_bytes is None:
        return unlimited
    # The parameters are loaded after the limits are known, so their memory is still free.
    left_bytes = max(device_bytes * devices - _size_bytes([model.parameters for model in models]), 0)
    if states_bytes > left_bytes:
        raise ConfigError(
            f"max_sequences={config.max_sequences}: the recurrent states of these sequences take "
            f"{states_bytes / 2**30:.1f} GiB, and {left_bytes / 2**30:.1f} GiB are free. Lower max_sequences, or "
            "model.cached_tokens of a model that has it."
        )
    if not page_bytes:
        return unlimited
    # Pages are replicated over the devices of different experts.
    share_bytes = _share_bytes(left_bytes, config.memory_fraction) // config.expert
    return max(share_bytes - states_bytes, 0) // page_bytes


def _share_bytes(left_bytes: int, fraction: float | None) -> int:
    """Returns the memory for the cache, given the memory left free by the parameters."""
    if fraction is not None or jax.default_backend() != "cpu":
        return int(left_bytes * (_DEVICE_FRACTION if fraction is None else fraction))
    share_bytes = min(int(left_bytes * _CPU_FRACTION), _MOST_CPU_BYTES)
    # Programs are compiled for a fixed number of pages. Without the rounding, this number would follow the free memory,
    # and each start would miss the compilation cache.
    return 1 << share_bytes.bit_length() - 1 if share_bytes else 0


def _size_bytes(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
