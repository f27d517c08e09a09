"""Device programs of an engine: a small set of fixed shapes, which can be compiled before the first request."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.ops.building import holds_values
from stack_core.ops.sampling.logprobs import TokenLogprobs
from stack_core.ops.sampling.sampling import Sampled, SamplingSettings, mask_words
from stack_core.text.images import ImageReader, image_reader_of
from stack_serve.llm.adapters import AdapterShapes, HostAdapter, Weights, put, unusable
from stack_serve.llm.buckets import Buckets
from stack_serve.llm.cache import LayoutPreferences, empty_layers, supports_shared_pool
from stack_serve.llm.compiled_programs import CompiledPrograms, Key, Progress
from stack_serve.llm.compiler_options import compile_threads, compiler_options, is_for_gpus
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig, PageLayout
from stack_serve.llm.image_features import ImageFeatures
from stack_serve.llm.images import FeatureRows, StepImages
from stack_serve.llm.lockstep import Leader
from stack_serve.llm.new_weights import leaves_by_path
from stack_serve.llm.page_copies import HANDOVER_PAGES, read_pages, write_pages
from stack_serve.llm.placement import Placement
from stack_serve.llm.sleeping import HostWeights, delete_arrays
from stack_serve.llm.step import ROW_FIELDS, SlotState, Step, admit
from stack_serve.llm.unstacking import Layers, layer_by_layer, loops_over, split_layers

__all__ = ["ForwardResult", "Programs", "StepResult"]

# XLA computes a product with one row as a multiplication and a sum, both in main memory: 14.5 us instead of about 3 us
# for a matrix of 2048 x 2048 in bfloat16 on an H100. With four rows it is a product.
_GPU_ROWS = 4
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


class Programs:
    """Device state of an engine (parameters, page pools and slots) and its compiled programs.

    Attributes:
      slots: tokens and settings of the sequence in each slot.

    Args:
      checkpoint: model to serve.
      config: settings of the engine.
      max_tokens: maximum total length of a prompt and its continuation.
      pages: number of cache pages.
      placement: placement of the arrays; None means the devices of this process.
      leader: connections to the other processes that launch the same programs; None without any.
      adapters: shapes of the adapter pool; None disables adapters.
      constraints: True includes the programs for constrained rows in `compile_all`.

    Raises:
      GenerationError: the model cannot apply adapters to a parameter in `adapters`.
    """

    _step_class: ClassVar[type[Step]] = Step

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
        self._config, self._checkpoint, self._leader = config, checkpoint, leader
        self._constraints = constraints
        self._unmasked: dict[int, jax.Array] = {}
        self._max_tokens = max_tokens
        self._row_fields = len(ROW_FIELDS) + -(-max_tokens // config.page_tokens)
        drafts = 0 if config.speculation is None else config.speculation.tokens
        min_rows = _GPU_ROWS if is_for_gpus() else 1
        self._buckets = Buckets(config.max_sequences, config.step_tokens, drafts, min_rows)
        self._states = self._find_states()
        if placement is None:
            placement = Placement(self._states, config.tensor, expert=config.expert)
        self._placement = placement
        self._compiled = CompiledPrograms(self._lowered)
        self.slots = self._placement.replicated(self._empty_slots())
        # Preferences come from a traced step, which itself needs some layout.
        self._lay_out(pages, config.page_layout or ANY_LAYOUT)
        pool = None if adapters is None else jax.eval_shape(adapters.pool)
        weights = Weights(checkpoint.parameters, pool)
        try:
            (looped, looped_pools), self._hidden, preferences = self._examined(weights)
        except Exception:  # a model may fail in any way if a parameter with adapters is not an array
            if adapters is not None:
                self._check_adapters(adapters)
            raise
        self._lay_out(pages, config.page_layout or preferences.best)
        # Such a layout merges the two pools of a layer, so the arrays sliced by loops must be determined again.
        if config.page_layout is None and holds_values(preferences.best):
            (looped, looped_pools), *_ = self._examined(weights)
        self._looped = looped.params
        empty, layout = self._empty, self._step.layout
        self._make_pools = lambda: self._placement.pools(lambda: split_layers(empty(), looped_pools), layout)
        # Pools are written once, with zeros, which takes about a second on CPUs. XLA releases the GIL meanwhile.
        with ThreadPoolExecutor(max_workers=1) as threads:
            pools = threads.submit(self._make_pools)
            params = self._placement.load(checkpoint, self._looped)
            self._layers = pools.result()
        held = None if adapters is None else self._placement.replicated(split_layers(adapters.pool(), looped.pool))
        self._weights, self._adapters = Weights(params, held), adapters
        self._slept_params: HostWeights | None = None
        reader = self._image_reader()
        self._images: ImageFeatures | None = None
        if reader is not None:
            self._images = ImageFeatures(checkpoint, reader, self._placement, config.step_tokens)

    def _image_reader(self) -> ImageReader | None:
        return image_reader_of(self._checkpoint)

    def _find_states(self) -> Any:
        """Returns the states that pools and slots hold, a pytree like `GenerativeCheckpoint.states`."""
        return self._checkpoint.states

    @property
    def buckets(self) -> Buckets:
        """Shapes of the programs."""
        return self._buckets

    @property
    def page_tokens(self) -> int:
        """Number of tokens per page."""
        return self._config.page_tokens

    @property
    def page_layout(self) -> PageLayout:
        """Axis order of the page pools: `config.page_layout`, or the preferred layout of the chip's implementations."""
        return self._step.layout

    @property
    def placement(self) -> Placement:
        """Placement of the arrays."""
        return self._placement

    @property
    def image_rows(self) -> int:
        """Number of rows of the feature pool; 0 for a model of text."""
        return 0 if self._images is None else self._images.rows.capacity

    @property
    def params(self) -> Any:
        """Current parameters of the base model; some may be `Layers`."""
        return self._weights.params

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
        return {key[0]: self._lowered(key).compile(compiler_options()) for key in keys}

    def admit(self, slot: int, tokens: Sequence[int], settings: SamplingSettings) -> None:
        """Initializes a slot with a sequence.

        Args:
          slot: slot of the sequence.
          tokens: all tokens of the sequence that the host knows.
          settings: sampling settings of the sequence, without the slot axis.
        """
        padded = np.zeros(self._max_tokens, np.int32)
        padded[: len(tokens)] = tokens
        self._launch(("admit",), np.int32(slot), padded, settings.packed())

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
        known, sampled = program(self._weights, known, settings, last, packed, chosen, given)
        self.slots = SlotState(known, settings)
        return sampled

    def _run_prompt_logprobs(self, program: Any, hidden: jax.Array, *targets: Any) -> TokenLogprobs:
        return program(self._weights, hidden, *targets)

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

    def sizes_bytes(self) -> dict[str, int]:
        """Returns the size of the device arrays by purpose."""
        held = {"parameters": self._weights.params, "pages": self._layers, "slots": self.slots}
        held |= {} if self._weights.pool is None else {"adapters": self._weights.pool}
        held |= {} if self._images is None else {"images": self._images.pool}
        return {name: sum(map(_stored_bytes, jax.tree.leaves(tree))) for name, tree in held.items()}

    def place(self, params: Any, *, donate: bool) -> Mapping[str, Any]:
        """Places new parameters for `use`, on any thread.

        Args:
          params: all parameters or a subset, in the structure and shapes of the checkpoint's parameters.
          donate: True deletes each array after placing it.

        Returns:
          Placed parameters by path.
        """
        return self._placement.params(self._checkpoint, params, self._looped, donate=donate)

    def use(self, params: Mapping[str, Any]) -> None:
        """Replaces the parameters in `params` from the next step on and keeps the rest."""
        # `Layers` stand for one parameter of the checkpoint and are replaced as one.
        old_leaves, structure = jax.tree.flatten(self._weights.params, is_leaf=lambda node: isinstance(node, Layers))
        paths = leaves_by_path(self._checkpoint.parameters)
        leaves = [params.get(path, leaf) for path, leaf in zip(paths, old_leaves, strict=True)]
        self._weights = replace(self._weights, params=jax.tree.unflatten(structure, leaves))
        if self._images is not None:
            self._images.rows.clear()

    def sleep(self, *, keep_weights: bool) -> None:
        """Frees the pages, and the weights or their place on the devices, until `wake_up`; no step may run.

        Args:
          keep_weights: True copies the weights to host memory (on CPUs, they stay in place). False makes `wake_up` read
            the checkpoint again.
        """
        jax.block_until_ready(self._layers)
        params = self._weights.params
        stays = keep_weights and jax.default_backend() == "cpu"
        self._slept_params = HostWeights.of(params) if keep_weights and not stays else None
        features = None if self._images is None else self._images.pool
        delete_arrays((self._layers, features) if stays else (self._layers, features, params))

    def wake_up(self) -> None:
        """Creates the pages and places the weights again.

        Raises:
          StackError: the checkpoint cannot be read.
        """
        params = self._weights.params
        if any(array.is_deleted() for array in jax.tree.leaves(params)):
            kept = self._slept_params
            params = self._placement.load(self._checkpoint, self._looped) if kept is None else kept.restored()
        self._layers = self._make_pools()
        if self._images is not None:
            self._images.allocate()
        self._weights, self._slept_params = replace(self._weights, params=params), None

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

    @property
    def _exchanged_pools(self) -> Any:
        """The pools whose pages engines exchange."""
        return self._layers

    def _replace_exchanged(self, pools: Any) -> None:
        self._layers = pools

    def _lowered_export(self) -> Any:
        return jax.jit(self._read_pages).lower(self._exchanged_pools, _int32(HANDOVER_PAGES))

    def _lowered_import(self) -> Any:
        pools, pages = self._exchanged_pools, _int32(HANDOVER_PAGES)
        exported = jax.eval_shape(self._read_pages, pools, pages)
        shardings = jax.tree.map(lambda pool: pool.sharding, pools)
        arrays = jax.tree.map(lambda each: self._placement.replicated(jnp.zeros(each.shape, each.dtype)), exported)
        write = partial(write_pages, layout=self._step.layout)
        return jax.jit(write, donate_argnums=0, out_shardings=shardings).lower(pools, pages, arrays)

    def _read_pages(self, pools: Any, pages: Any) -> tuple[Any, ...]:
        return read_pages(pools, pages, self._step.layout)

    def _packed(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray, row_bucket: int) -> np.ndarray:
        """Packs the rows of a step into one array and pads it with rows of the padding slot."""
        # One array: the host spent 0.7 ms of a step of 3.8 ms on handing 190 arrays to two programs.
        packed = np.zeros((row_bucket, self._row_fields), np.int32)
        packed[:, 0] = self._config.max_sequences
        packed[:, ROW_FIELDS.index("adapter")] = -1
        packed[: len(rows), : len(ROW_FIELDS)] = rows
        packed[: len(rows), len(ROW_FIELDS) :] = tables
        return packed

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

    def _keys(self) -> list[Key]:
        loads: list[Key] = [] if self._adapters is None else [("adapter",)]
        return [
            ("admit",),
            *loads,
            *([] if self._images is None else self._images.keys(self._buckets.prompts)),
            *((kind, size) for kind, sizes in self._sizes().items() for size in sizes),
        ]

    def _lowered(self, key: Key) -> Any:
        return self._placement.traced(getattr(self, f"_lowered_{key[0]}"), *key[1:])

    def _lowered_admit(self) -> Any:
        words = self.slots.settings.shape[1]
        return jax.jit(admit, donate_argnums=0).lower(self.slots, _int32(), _int32(self._max_tokens), _int32(words))

    def _lowered_adapter(self) -> Any:
        assert self._adapters is not None
        # An adapter without factors has the shapes of every adapter.
        factors = self._adapters.fitted("", {}).factors
        return jax.jit(put, donate_argnums=0).lower(self._weights.pool, _int32(), factors)

    def _lowered_decode(self, rows: int, candidates: int = 0) -> Any:
        sizes = {"repeats": self._config.decode_repeats, "padded_rows": self._buckets.largest_rows}

        def decode(weights: Weights, layers: Any, known: Any, settings: Any, packed: Any) -> Any:
            return self._step.decode(weights, layers, known, settings, packed, **sizes, candidates=bool(candidates))

        slots, packed = self.slots, _int32(rows, self._row_fields)
        # Donated pools are updated in place; a copy would need the memory of a second cache.
        jitted = jax.jit(decode, donate_argnums=(1, 2), out_shardings=(None, None, None, self._placement.readable))
        return jitted.lower(self._weights, self._layers, slots.tokens, slots.settings, packed)

    def _lowered_forward(self, rows: int) -> Any:
        padded_rows = self._buckets.largest_rows

        def forward(weights: Weights, layers: Any, known: Any, packed: Any) -> Any:
            step = layer_by_layer(partial(self._step.forward, padded_rows=padded_rows))
            return step(weights, layers, known, packed)

        packed = _int32(rows, self._row_fields)
        return jax.jit(forward, donate_argnums=1).lower(self._weights, self._layers, self.slots.tokens, packed)

    def _lowered_prefill(self, tokens: int) -> Any:
        padded_tokens = self._buckets.largest_tokens

        def prefill(weights: Weights, layers: Any, known: Any, packed: Any) -> Any:
            step = layer_by_layer(partial(self._step.prefill, tokens=tokens, padded_tokens=padded_tokens))
            return step(weights, layers, known, packed)

        packed = _int32(self._buckets.largest_rows, self._row_fields)
        return jax.jit(prefill, donate_argnums=1).lower(self._weights, self._layers, self.slots.tokens, packed)

    def _lowered_see(self, tokens: int) -> Any:
        images, padded_tokens = self._images, self._buckets.largest_tokens
        assert images is not None

        def see(weights: Weights, layers: Any, known: Any, packed: Any, *inputs: Any) -> Any:
            options: Any = {"padded_tokens": padded_tokens, "images": images.image_tokens(*inputs)}
            return layer_by_layer(partial(self._step.prefill, tokens=tokens, **options))(weights, layers, known, packed)

        packed = _int32(self._buckets.largest_rows, self._row_fields)
        inputs = (images.pool, *images.step_shapes(tokens))
        return jax.jit(see, donate_argnums=1).lower(self._weights, self._layers, self.slots.tokens, packed, *inputs)

    def _lowered_encode(self, tokens: int) -> Any:
        assert self._images is not None

        def encode(weights: Weights, features: Any, *image: Any) -> Any:
            return layer_by_layer(self._step.encode)(weights, features, *image)

        jitted = jax.jit(encode, donate_argnums=1)
        return jitted.lower(self._weights, self._images.pool, *self._images.encode_shapes(tokens))

    def _lowered_verify(self, tokens: int, candidates: int = 0) -> Any:
        def verify(weights: Weights, layers: Any, known: Any, settings: Any, *step: Any) -> Any:
            run = layer_by_layer(partial(self._step.verify, candidates=bool(candidates)))
            return run(weights, layers, known, settings, *step)

        slots, packed = self.slots, _int32(self._buckets.largest_rows, self._row_fields)
        mask = _int32(tokens, mask_words(self._checkpoint.vocab_size))
        jitted = jax.jit(verify, donate_argnums=(1, 2), out_shardings=(None, None, None, self._placement.readable))
        return jitted.lower(self._weights, self._layers, slots.tokens, slots.settings, packed, _int32(tokens), mask)

    def _lowered_sample(self, samples: int, candidates: int = 0) -> Any:
        def sample(weights: Weights, known: Any, settings: Any, *rows: Any) -> Any:
            run = layer_by_layer(partial(self._step.sample_some, candidates=bool(candidates)))
            return run(weights, known, settings, *rows)

        rows = self._buckets.largest_rows
        last = jax.ShapeDtypeStruct((rows, *self._hidden.shape[1:]), self._hidden.dtype)
        slots, packed = self.slots, _int32(rows, self._row_fields)
        mask = _int32(samples, mask_words(self._checkpoint.vocab_size))
        jitted = jax.jit(sample, donate_argnums=1, out_shardings=(None, self._placement.readable))
        return jitted.lower(self._weights, slots.tokens, slots.settings, last, packed, _int32(samples), mask)

    def _lowered_prompt_logprobs(self, tokens: int) -> Any:
        def prompt_logprobs(weights: Weights, hidden: Any, targets: Any, count: Any) -> Any:
            return layer_by_layer(self._step.prompt_logprobs)(weights, hidden, targets, count)

        hidden = jax.ShapeDtypeStruct((tokens, 1, *self._hidden.shape[1:]), self._hidden.dtype)
        jitted = jax.jit(prompt_logprobs, out_shardings=self._placement.readable)
        return jitted.lower(self._weights, hidden, _int32(tokens), _int32())

    def _lay_out(self, pages: int, layout: PageLayout) -> None:
        """Sets the page layout of steps and new pools."""
        self._step = self._step_class(self._checkpoint, self._config, pages, layout)
        self._empty = partial(
            empty_layers,
            self._states,
            pages=pages,
            page_tokens=self._config.page_tokens,
            slots=self._config.max_sequences + 1,
            layout=layout,
            dtype=self._config.cache_dtype,
        )

    def _examined(self, weights: Weights) -> tuple[Any, jax.ShapeDtypeStruct, LayoutPreferences]:
        """Traces the smallest step.

        Returns:
          Weights and pools, with True for an array used only by loops over layers; the shape [rows, embed] and dtype of
          the hidden states; and the preferred page layouts, which are not collected if the config sets a layout.
        """
        preferences = LayoutPreferences(one_pool=supports_shared_pool(self._states))
        collected = preferences if self._config.page_layout is None else None
        step = partial(self._smallest_step, preferences=collected)
        looped, result = self._placement.traced(loops_over, step, (weights, jax.eval_shape(self._empty)))
        return looped, result[-1], preferences

    def _smallest_step(self, weights_and_layers: Any, *, preferences: LayoutPreferences | None = None) -> Any:
        rows, step = jnp.zeros((1, self._row_fields), jnp.int32), partial(self._step, tokens=1, preferences=preferences)
        return layer_by_layer(step)(*weights_and_layers, self.slots.tokens, rows)

    def _check_adapters(self, adapters: AdapterShapes) -> None:
        """Traces a step with adapters of one parameter at a time; raises a GenerationError that lists the failures."""
        layers, params = jax.eval_shape(self._empty), self._checkpoint.parameters
        faults: dict[str, Exception] = {}
        for path in adapters.targets:
            weights = Weights(params, jax.eval_shape(adapters.only(path).pool))
            try:
                self._placement.traced(jax.eval_shape, self._smallest_step, (weights, layers))
            except Exception as error:  # any failure, as in `__init__`
                faults[path] = error
        if faults:
            raise unusable(faults)

    def _empty_slots(self) -> SlotState:
        """Creates NumPy arrays, because JAX arrays would need devices, which a compilation target may lack."""
        slots = self._config.max_sequences + 1
        settings = np.tile(SamplingSettings.greedy_row().packed(), (slots, 1))
        return SlotState(np.zeros((slots, self._max_tokens), np.int32), settings)


def _sampling_key(kind: str, size: int, candidates: bool) -> Key:
    """Returns the key of a program that samples.

    Programs that report candidates are separate, since candidates would slow down every step. Only rollouts request
    them, so `compile_all` omits these programs and their first use compiles them.
    """
    return (kind, size, 1) if candidates else (kind, size)


def _stored_bytes(array: Any) -> int:
    # `nbytes` counts one byte for an int4 entry; CPUs and accelerators store two in a byte.
    return array.nbytes // 2 if array.dtype == jnp.int4 else array.nbytes


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
