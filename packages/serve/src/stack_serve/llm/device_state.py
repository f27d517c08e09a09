"""Device state of an engine: parameters, page pools, and the slots of running sequences."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.ops.building import holds_values
from stack_core.text.images import ImageReader, image_reader_of
from stack_serve.llm.adapters import AdapterShapes, Weights, unusable
from stack_serve.llm.buckets import Buckets
from stack_serve.llm.cache import LayoutPreferences, empty_layers, supports_shared_pool
from stack_serve.llm.compiler_options import is_for_gpus
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig, PageLayout
from stack_serve.llm.head_weights import HeadWeights
from stack_serve.llm.image_features import ImageFeatures
from stack_serve.llm.logits_processors import idle_words, open_processors
from stack_serve.llm.new_weights import leaves_by_path
from stack_serve.llm.placement import Placement
from stack_serve.llm.sleeping import HostWeights, delete_arrays
from stack_serve.llm.step import ROW_FIELDS, SlotState, Step
from stack_serve.llm.unstacking import Layers, layer_by_layer, loops_over, split_layers

__all__ = ["DeviceState"]

# XLA computes a product with one row as a multiplication and a sum, both in main memory: 14.5 us instead of about 3 us
# for a matrix of 2048 x 2048 in bfloat16 on an H100. With four rows it is a product.
_GPU_ROWS = 4


class DeviceState:
    """Arrays of an engine on the devices, and their lifetime: loading, new weights, sleep.

    Attributes:
      slots: tokens and settings of the sequence in each slot.

    Args:
      checkpoint: model to serve.
      config: settings of the engine.
      max_tokens: maximum total length of a prompt and its continuation.
      pages: number of cache pages.
      placement: placement of the arrays; None means the devices of this process.
      adapters: shapes of the adapter pool; None disables adapters.

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
        adapters: AdapterShapes | None = None,
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._max_tokens = max_tokens
        self._row_fields = len(ROW_FIELDS) + -(-max_tokens // config.page_tokens)
        drafts = 0 if config.speculation is None else config.speculation.tokens
        min_rows = _GPU_ROWS if is_for_gpus() else 1
        self._buckets = Buckets(config.max_sequences, config.step_tokens, drafts, min_rows)
        self._states = self._find_states()
        if placement is None:
            placement = Placement(self._states, config.tensor, expert=config.expert)
        self._placement = placement
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
        # Here, because the dtype depends on the compilation target of this thread.
        shapes, layout = jax.eval_shape(lambda: split_layers(self._empty(), looped_pools)), self._step.layout
        self._make_pools = lambda: self._placement.pools(shapes, layout)
        # Pools are written once, with zeros, which takes about a second on CPUs. XLA releases the GIL meanwhile.
        with ThreadPoolExecutor(max_workers=1) as threads:
            pools = threads.submit(self._make_pools)
            params = self._placement.load(checkpoint, self._looped)
            self._layers = pools.result()
        held = None if adapters is None else self._placement.replicated(split_layers(adapters.pool(), looped.pool))
        self._weights, self._adapters = Weights(params, held), adapters
        self._head = self._placement.traced(HeadWeights, checkpoint, params, self._hidden)
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
        settings = np.tile(idle_words(open_processors(self._config.logits_processors)), (slots, 1))
        return SlotState(np.zeros((slots, self._max_tokens), np.int32), settings)


def _stored_bytes(array: Any) -> int:
    # `nbytes` counts one byte for an int4 entry; CPUs and accelerators store two in a byte.
    return array.nbytes // 2 if array.dtype == jnp.int4 else array.nbytes
