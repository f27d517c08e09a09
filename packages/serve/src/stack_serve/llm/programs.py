"""Device programs of an engine: a small set of fixed shapes, which can be compiled before the first request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.ops.sampling.logprobs import TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled, mask_words
from stack_serve.llm.adapters import AdapterShapes, HostAdapter
from stack_serve.llm.compiled_programs import CompiledPrograms, Key, Progress
from stack_serve.llm.compiler_options import compile_threads, compiler_options, is_for_gpus
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.images import FeatureRows, StepImages
from stack_serve.llm.lockstep import Leader
from stack_serve.llm.lowering import LoweredPrograms
from stack_serve.llm.page_copies import HANDOVER_PAGES
from stack_serve.llm.placement import Placement
from stack_serve.llm.step import ROW_FIELDS, SlotState

__all__ = ["ForwardResult", "Programs", "StepResult"]

# A prompt of up to so many tokens can start as soon as the server is ready.
_FIRST_TOKENS = 64
_LATER_KINDS = ("prompt_logprobs", "forward", "fill_mtp", "draft_mtp")


@dataclass(frozen=True)
class ForwardResult:
    """Result of the forward pass of a step whose rows are not sampled yet.

    Attributes:
      hidden: hidden states [tokens, 1, embed] as device array.
      last: hidden state of each row's last token, [rows, embed], as device array.
      packed: int32[rows, fields], packed rows.
      places: indices of the rows that sample.
    """

    hidden: jax.Array
    last: jax.Array
    packed: np.ndarray
    places: list[int]


@dataclass(frozen=True)
class StepResult:
    """Result of a step as device arrays, possibly still being computed.

    Attributes:
      sampled: sampled tokens [repeats, rows], or [1, tokens] of a verification; None without sampled rows.
      hidden: hidden states [tokens, 1, embed], from which prompt log-probabilities are computed.
    """

    sampled: Sampled | None
    hidden: jax.Array


class Programs(LoweredPrograms):
    """Device state of an engine and its compiled programs, which it launches.

    Args:
      checkpoint, config, max_tokens, pages, placement, adapters: as in `DeviceState`.
      leader: connections to the other processes that launch the same programs; None without any.
      constraints: True includes the programs for constrained rows in `compile_all`.

    Raises:
      GenerationError: the model cannot apply adapters to a parameter in `adapters`.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        config: EngineConfig,
        *,
        max_tokens: int,
        pages: int,
        placement: Placement | None = None,
        leader: Leader | None = None,
        adapters: AdapterShapes | None = None,
        constraints: bool = False,
    ) -> None:
        sizes = {"max_tokens": max_tokens, "pages": pages}
        super().__init__(checkpoint, config, **sizes, placement=placement, adapters=adapters)
        self._leader, self._constraints = leader, constraints
        self._unmasked: dict[int, jax.Array] = {}
        self._compiled = CompiledPrograms(self._lowered)

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles all programs; see `CompiledPrograms.compile_all`."""
        self._compiled.compile_all(self._keys(), progress)

    def compile_first(self, progress: Progress | None = None, *, if_needed: bool = False) -> None:
        """Compiles one program each of admission, prompts and sampling, and others in the background.

        Until then, a step runs in the smallest compiled program with enough rows and tokens, a decoding step also in a
        program of prompts. Otherwise it waits for its own program.

        Args:
          progress: as in `CompiledPrograms.compile_all`.
          if_needed: True leaves out programs whose steps can run in a larger one, except decoding of few rows. The
            background compiles each of them once a step needs it.
        """
        first = self._first_keys()
        rest = sorted((key for key in self._keys() if key not in first), key=self._urgency)
        later = [key for key in rest[1:] if if_needed and self._has_larger(key)]
        soon = [key for key in rest if key not in later]
        # On CPUs, XLA itself compiles with several threads, and the steps need the rest.
        threads = compile_threads() if is_for_gpus() else 1
        self._compiled.compile_first(first, soon, progress, threads=threads, if_needed=later)

    @property
    def to_compile(self) -> int:
        """Number of programs that wait or compile in the background; see `CompiledPrograms.to_compile`."""
        return self._compiled.to_compile

    def stop_compiling(self) -> None:
        """Ends the compilation in the background, after the current programs."""
        self._compiled.stop()

    def _keys(self) -> list[Key]:
        loads: list[Key] = [] if self._adapters is None else [("adapter",)]
        return [
            ("admit",),
            *loads,
            *([] if self._images is None else self._images.keys(self._buckets.prompts)),
            *((kind, size) for kind, sizes in self._sizes().items() for size in sizes),
        ]

    def _sizes(self) -> dict[str, list[int]]:
        """Returns the sizes of the programs of steps by kind, in ascending order."""
        buckets = self._buckets
        return {
            "decode": buckets.decoding,
            "sample": buckets.samples,
            "prefill": buckets.prompts,
            # Decode and prefill programs pad their hidden states to these two sizes.
            "prompt_logprobs": sorted({buckets.largest_rows, buckets.largest_tokens}),
            "forward": buckets.decoding if self._constraints else [],
            "verify": buckets.verification,
        }

    def _first_keys(self) -> list[Key]:
        # The smallest program would serve few tokens.
        prefill = self._buckets.of_prompts(min(_FIRST_TOKENS, self._config.step_tokens))
        first: list[Key] = [("admit",), ("prefill", prefill), ("sample", self._buckets.samples[0])]
        return first if self._adapters is None else [*first, ("adapter",)]

    def _has_larger(self, key: Key) -> bool:
        """Returns whether the steps of a program can run in a larger one; decoding can run in programs of prompts."""
        kind, *sizes = key
        largest = {name: sizes[-1:] for name, sizes in self._sizes().items() if name in ("prefill", "sample", "verify")}
        return kind in ("decode", "forward") or (kind in largest and sizes != largest[kind])

    def _urgency(self, key: Key) -> tuple[bool, int, bool, tuple[int, ...]]:
        """Orders programs: first decoding, then the smallest and the largest steps, which can run any rows."""
        kind, *sizes = key
        is_decoding = key == ("decode", self._buckets.of_decoding(min(2, self._config.max_sequences)))
        of_kind = [sizes for other, *sizes in self._keys() if other == kind]
        is_extreme = sizes in (of_kind[0], of_kind[-1])
        later = _LATER_KINDS.index(kind) + 1 if kind in _LATER_KINDS else 0
        return (not is_decoding, later, not is_extreme, tuple(sizes))

    def decodes(self, rows: int) -> bool:
        """Returns whether the decoding program of so many rows is compiled, or will be compiled on its first use."""
        rows = self._buckets.of_decoding(min(max(rows, 1), self._config.max_sequences))
        return self._compiled.is_ready("decode", self._compiled.ready_size("decode", rows, self._buckets.decoding))

    def largest(self) -> dict[str, jax.stages.Compiled]:
        """Compiles the two programs with the largest memory use: the full decode batch and the longest prefill."""
        keys = (("decode", self._buckets.largest_rows), ("prefill", self._buckets.largest_tokens))
        return {key[0]: self._lowered(key).compile(compiler_options(key[0])) for key in keys}

    def admit(self, slot: int, tokens: Sequence[int], settings: np.ndarray) -> None:
        """Initializes a slot with a sequence.

        Args:
          slot: slot of the sequence.
          tokens: all tokens of the sequence that the host knows.
          settings: words of the sequence in `SlotState.settings`.
        """
        padded = np.zeros(self._max_tokens, np.int32)
        padded[: len(tokens)] = tokens
        self._launch(("admit",), np.int32(slot), padded, settings)

    def step(
        self,
        rows: Sequence[tuple[int, ...]],
        tables: np.ndarray,
        *,
        repeats: int = 1,
        candidates: bool = False,
        images: StepImages | None = None,
    ) -> StepResult:
        """Launches a step, padded to the next bucket of shapes.

        Args:
          rows: `ROW_FIELDS` of each row.
          tables: int32[rows, pages], page numbers of each row's sequence.
          repeats: number of decoding steps in the launch. Above 1, a row computes one token per step until it has
            computed all tokens of its field.
          candidates: True reports the candidates of sampled tokens, by programs that are compiled on first use.
          images: image tokens of the step; None without any.
        """
        # Prompt chunks of one token run in a decode program, too.
        is_decoding = sum(row[2] for row in rows) == len(rows) and (candidates or self.decodes(len(rows)))
        if images is not None or (repeats == 1 and not is_decoding):
            return self.sample(self.forward(rows, tables, images), candidates=candidates)
        row_bucket = self._compiled.ready_size("decode", self._buckets.of_decoding(len(rows)), self._buckets.decoding)
        packed = self._packed(rows, tables, row_bucket)
        hidden, sampled = self._launch(_sampling_key("decode", row_bucket, candidates), packed)
        return StepResult(sampled, hidden)

    def encode_images(self, images: Sequence[PromptImage]) -> FeatureRows:
        """Launches the computation of missing features of a step's images, and returns the rows of all features."""
        assert self._images is not None
        self._images.encode(images, self._weights, self._compiled)
        return self._images.rows

    def forward(
        self, rows: Sequence[tuple[int, ...]], tables: np.ndarray, images: StepImages | None = None
    ) -> ForwardResult:
        """Launches the forward pass of a step; `sample` launches the rest. See `step` for the arguments."""
        tokens = sum(row[2] for row in rows)
        packed = self._packed(rows, tables, self._buckets.largest_rows)
        if images is not None:
            assert self._images is not None
            size = self._buckets.of_prompts(tokens)
            program, inputs = self._compiled["see", size], self._images.step_inputs(images, size)
            self._layers, hidden, last = program(self._weights, self._layers, self.slots.tokens, packed, *inputs)
            return ForwardResult(hidden, last, packed, [place for place, row in enumerate(rows) if row[3]])
        row_bucket = self._compiled.ready_size("forward", self._buckets.of_decoding(len(rows)), self._buckets.decoding)
        if tokens == len(rows) and self._compiled.is_ready("forward", row_bucket):
            hidden, last = self._launch(("forward", row_bucket), packed[:row_bucket])
        else:
            size = self._compiled.ready_size("prefill", self._buckets.of_prompts(tokens), self._buckets.prompts)
            hidden, last = self._launch(("prefill", size), packed)
        return ForwardResult(hidden, last, packed, [place for place, row in enumerate(rows) if row[3]])

    def fill(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> None:
        """Launches the forward pass of rows whose tokens are known, to compute their keys; see `step`."""
        tokens = sum(row[2] for row in rows)
        size = self._compiled.ready_size("prefill", self._buckets.of_prompts(tokens), self._buckets.prompts)
        self._launch(("prefill", size), self._packed(rows, tables, self._buckets.largest_rows))

    def sample(self, forward: ForwardResult, mask: np.ndarray | None = None, *, candidates: bool = False) -> StepResult:
        """Launches the sampling of a step.

        Args:
          forward: result of the forward pass of the last launched step.
          mask: int32[places, words], tokens allowed by the constraint of each row that samples; None allows all.
          candidates: as in `step`.
        """
        places = forward.places
        if not places:
            return StepResult(None, forward.hidden)
        size = self._compiled.ready_size("sample", self._buckets.of_samples(len(places)), self._buckets.samples)
        chosen = np.full(size, len(forward.packed), np.int32)
        chosen[: len(places)] = places
        inputs = (forward.packed, chosen, self._masks(mask, size))
        sampled = self._launch(_sampling_key("sample", size, candidates), *inputs, after=forward.last)
        return StepResult(sampled, forward.hidden)

    def verify(
        self,
        rows: Sequence[tuple[int, ...]],
        tables: np.ndarray,
        drafted: Sequence[int],
        mask: np.ndarray | None = None,
        *,
        candidates: bool = False,
    ) -> StepResult:
        """Launches a step that verifies drafts.

        Args:
          rows, tables: as in `step`.
          drafted: tokens that the rows compute, row by row: the newest token of each, then its drafts.
          mask: int32[tokens, words], tokens allowed by a constraint at each of these positions; None allows all.
          candidates: as in `step`.
        """
        sizes = self._buckets.verification
        size = self._compiled.ready_size("verify", self._buckets.of_verification(len(drafted)), sizes)
        packed = self._packed(rows, tables, self._buckets.largest_rows)
        padded = np.zeros(size, np.int32)
        padded[: len(drafted)] = drafted
        inputs = (packed, padded, self._masks(mask, size))
        hidden, sampled = self._launch(_sampling_key("verify", size, candidates), *inputs)
        return StepResult(sampled, hidden)

    def _launch(self, key: Key, *inputs: Any, after: jax.Array | None = None) -> Any:
        """Launches a program in all processes.

        Args:
          inputs: inputs from the host.
          after: hidden states of the last step in this process, if the program continues the step.
        """
        if self._leader is not None:
            self._leader.compile(key, self.compile)
            self._leader.send(key, inputs)
        return self.run(key, *inputs) if after is None else self.run(key, after, *inputs)

    def compile(self, key: Key) -> None:
        """Compiles a program, or waits for its compilation in the background."""
        _ = self._compiled[key]

    def run(self, key: Key, *inputs: Any) -> Any:
        """Launches a program in this process, on the current state; see the methods `_run_...` for the results."""
        return getattr(self, f"_run_{key[0]}")(self._compiled[key], *inputs)

    def _run_admit(self, program: Any, *sequence: Any) -> None:
        self.slots = program(self.slots, *sequence)

    def _run_adapter(self, program: Any, *adapter: Any) -> None:
        self._weights = replace(self._weights, pool=program(self._weights.pool, *adapter))

    def _run_prefill(self, program: Any, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Returns the hidden states, and those of each row's last token."""
        self._layers, hidden, last = program(self._weights, self._layers, self.slots.tokens, packed)
        return hidden, last

    _run_forward = _run_prefill

    def _run_decode(self, program: Any, *inputs: Any) -> tuple[jax.Array, Sampled]:
        """Returns the hidden states and the sampled tokens."""
        known, settings = self.slots.tokens, self.slots.settings
        self._layers, hidden, known, sampled = program(self._weights, self._layers, known, settings, *inputs)
        self.slots = SlotState(known, settings)
        return hidden, sampled

    def _run_verify(
        self, program: Any, packed: np.ndarray, drafted: np.ndarray, masks: np.ndarray | None
    ) -> tuple[jax.Array, Sampled]:
        given = self._all_tokens(len(drafted)) if masks is None else masks
        return self._run_decode(program, packed, drafted, given)

    def _run_sample(
        self, program: Any, last: jax.Array, packed: np.ndarray, chosen: np.ndarray, masks: np.ndarray | None
    ) -> Sampled:
        known, settings = self.slots.tokens, self.slots.settings
        given = self._all_tokens(len(chosen)) if masks is None else masks
        head = self._head.of(self._weights.params)
        known, sampled = program(head, known, settings, last, packed, chosen, given)
        self.slots = SlotState(known, settings)
        return sampled

    def _run_prompt_logprobs(self, program: Any, hidden: jax.Array, *targets: Any) -> TokenLogprobs:
        return program(self._head.of(self._weights.params), hidden, *targets)

    def _masks(self, mask: np.ndarray | None, rows: int) -> np.ndarray | None:
        """Pads the masks of a step's rows with masks that allow all tokens; None stays None."""
        if mask is None:
            return None
        masks = np.full((rows, mask_words(self._checkpoint.vocab_size)), -1, np.int32)
        masks[: len(mask)] = mask
        return masks

    def _all_tokens(self, rows: int) -> jax.Array:
        """Returns a device array of masks that allow all tokens, which costs no transfer in each step."""
        if rows not in self._unmasked:
            words = mask_words(self._checkpoint.vocab_size)
            self._unmasked[rows] = self._placement.replicated(np.full((rows, words), -1, np.int32))
        return self._unmasked[rows]

    def prompt_logprobs(self, result: StepResult | ForwardResult, targets: Sequence[int]) -> TokenLogprobs:
        """Computes the log-probability of `targets[i]` after token i of a step."""
        padded = np.zeros(len(result.hidden), np.int32)
        padded[: len(targets)] = targets
        key: Key = ("prompt_logprobs", len(padded))
        return self._launch(key, padded, np.int32(len(targets)), after=result.hidden)

    def load_adapter(self, slot: int, adapter: HostAdapter) -> None:
        """Writes an adapter to a slot of the pool, for use from the next step on."""
        self._launch(("adapter",), np.int32(slot), adapter.factors)

    def compile_handover(self) -> None:
        """Compiles the programs of `export_pages` and `import_pages`."""
        self._compiled.compile_all([("export",), ("import",)], progress=None)

    def export_pages(self, pages: Sequence[int]) -> tuple[jax.Array, ...]:
        """Launches a copy of up to `HANDOVER_PAGES` pages of all layers, padded with others.

        Returns:
          One array [HANDOVER_PAGES, entries] for each dtype of the pools, on the first device.
        """
        padded = np.zeros(HANDOVER_PAGES, np.int32)
        padded[: len(pages)] = pages
        pools = self._exchanged_pools
        device = jax.tree.leaves(pools)[0].sharding.device_set
        first = min(device, key=lambda each: each.id)
        return tuple(jax.device_put(array, first) for array in self._compiled[("export",)](pools, padded))

    def import_pages(self, pages: Sequence[int | None], arrays: Sequence[Any]) -> None:
        """Writes exported pages to pages of all layers.

        Args:
          pages: number of the page for each exported page; None skips it.
          arrays: result of `export_pages`, of an engine with the same config.
        """
        padded = np.full(HANDOVER_PAGES, self._step.pages, np.int32)  # out of range: not written
        padded[: len(pages)] = [self._step.pages if page is None else page for page in pages]
        pools = self._compiled[("import",)](self._exchanged_pools, padded, self._placement.replicated(tuple(arrays)))
        self._replace_exchanged(pools)

    def _replace_exchanged(self, pools: Any) -> None:
        self._layers = pools

    def _packed(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray, row_bucket: int) -> np.ndarray:
        """Packs the rows of a step into one array and pads it with rows of the padding slot."""
        # One array: the host spent 0.7 ms of a step of 3.8 ms on handing 190 arrays to two programs.
        packed = np.zeros((row_bucket, self._row_fields), np.int32)
        packed[:, 0] = self._config.max_sequences
        packed[:, ROW_FIELDS.index("adapter")] = -1
        packed[: len(rows), : len(ROW_FIELDS)] = rows
        packed[: len(rows), len(ROW_FIELDS) :] = tables
        return packed


def _sampling_key(kind: str, size: int, candidates: bool) -> Key:
    """Returns the key of a program that samples.

    Programs that report candidates are separate, since candidates would slow down every step. Only rollouts request
    them, so `compile_all` omits these programs and their first use compiles them.
    """
    return (kind, size, 1) if candidates else (kind, size)
