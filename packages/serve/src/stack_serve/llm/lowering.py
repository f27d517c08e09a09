"""Lowering of an engine's programs, each by its kind and sizes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.ops.sampling.sampling import mask_words
from stack_serve.llm.adapters import Weights, put
from stack_serve.llm.compiled_programs import Key
from stack_serve.llm.device_state import DeviceState
from stack_serve.llm.page_copies import HANDOVER_PAGES, read_pages, write_pages
from stack_serve.llm.step import admit
from stack_serve.llm.unstacking import layer_by_layer

__all__ = ["LoweredPrograms"]


class LoweredPrograms(DeviceState):
    """Lowers the programs that compute on the device state; `_lowered_KIND` takes the sizes of a key."""

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
        def sample(head: tuple[Any, ...], known: Any, settings: Any, *rows: Any) -> Any:
            run = layer_by_layer(partial(self._step.sample_some, candidates=bool(candidates)))
            return run(Weights(self._head.restored(head), None), known, settings, *rows)

        rows = self._buckets.largest_rows
        last = jax.ShapeDtypeStruct((rows, *self._hidden.shape[1:]), self._hidden.dtype)
        slots, packed = self.slots, _int32(rows, self._row_fields)
        mask = _int32(samples, mask_words(self._checkpoint.vocab_size))
        jitted = jax.jit(sample, donate_argnums=1, out_shardings=(None, self._placement.readable))
        head = self._head.of(self._weights.params)
        return jitted.lower(head, slots.tokens, slots.settings, last, packed, _int32(samples), mask)

    def _lowered_prompt_logprobs(self, tokens: int) -> Any:
        def prompt_logprobs(head: tuple[Any, ...], *tokens: Any) -> Any:
            return layer_by_layer(self._step.prompt_logprobs)(Weights(self._head.restored(head), None), *tokens)

        hidden = jax.ShapeDtypeStruct((tokens, 1, *self._hidden.shape[1:]), self._hidden.dtype)
        jitted = jax.jit(prompt_logprobs, out_shardings=self._placement.readable)
        return jitted.lower(self._head.of(self._weights.params), hidden, _int32(tokens), _int32())

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

    @property
    def _exchanged_pools(self) -> Any:
        """The pools whose pages engines exchange."""
        return self._layers


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
