"""What the references promise about memory and work, read from what XLA compiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.building import contract
from stack_core.ops.references import attention_tiles
from stack_core.programs.flops import count_flops

MIB = 2**20


def _temporary_bytes(function: Any, *arrays: jax.ShapeDtypeStruct) -> int:
    memory = jax.jit(function).lower(*arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes


def _attention_bytes(attention: Any, tokens: int, dtype: str = "float32") -> int:
    """What XLA plans for attention with 8 heads and its gradient."""
    operand = jax.ShapeDtypeStruct((1, tokens, 8, 64), dtype)

    def total(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(attention(query, key, value).astype(jnp.float32))

    return _temporary_bytes(jax.value_and_grad(total, argnums=(0, 1, 2)), operand, operand, operand)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_attention_of_32k_tokens_and_8_heads_needs_less_than_1_gib(dtype: str) -> None:
    assert _attention_bytes(functools.partial(ops.attention, causal=True), 32768, dtype) < 1024 * MIB


def test_attention_of_8k_tokens_needs_less_than_a_quarter_of_jax_own() -> None:
    dense = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    assert _attention_bytes(ops.attention, 8192) < _attention_bytes(dense, 8192) / 4


@pytest.mark.parametrize(("causal", "window", "share"), [(True, None, 0.53), (True, (256, 0), 0.08), (False, None, 1)])
def test_attention_leaves_out_what_is_hidden(causal: bool, window: Any, share: float) -> None:
    operand = jax.ShapeDtypeStruct((1, 8192, 8, 64), "float32")
    call = functools.partial(ops.attention, causal=causal, window=window)
    assert count_flops(call, operand, operand, operand).total <= share * 4 * 8 * 64 * 8192**2


@pytest.mark.parametrize("sizes", [(0, 5000), (5000, 0), (1, 0)])
def test_attention_without_queries_or_keys(sizes: tuple[int, int]) -> None:
    query, key = jnp.ones((1, sizes[0], 2, 4)), jnp.ones((1, sizes[1], 2, 4))
    output, gradient = jax.value_and_grad(lambda query: jnp.sum(ops.attention(query, key, key)))(query)
    assert float(output) == 0 and gradient.shape == query.shape and not jnp.any(gradient)


def test_lengths_out_of_range_show_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_TILE_BYTES", "_FEWEST_ROWS", "_FEWEST_KEYS"):
        monkeypatch.setattr(attention_tiles, limit, 4)
    query, key = jnp.ones((2, 5, 2, 4)), jnp.ones((2, 10, 2, 4))
    call = functools.partial(ops.attention, query, key, key, implementation="reference")
    found = call(kv_lengths=jnp.array([100, -(2**31)]))
    np.testing.assert_array_equal(found, call(kv_lengths=jnp.array([10, 0])))
    np.testing.assert_allclose(found[0], 1, rtol=1e-6)


def test_offsets_out_of_range_see_all_keys_or_none() -> None:
    query, key = jnp.ones((2, 5, 2, 4)), jnp.ones((2, 10, 2, 4))
    call = functools.partial(ops.attention, query, key, key, causal=True, return_lse=True, implementation="reference")
    found = call(query_offset=jnp.array([2**31 - 1, -(2**31)]))
    np.testing.assert_allclose(found[1][0], np.log(10) + 2, rtol=1e-6)
    assert not jnp.any(found[0][1]) and jnp.all(found[1][1] == -jnp.inf)


@pytest.mark.parametrize("rows", [(3,), (2, 0)])
def test_products_over_no_features_are_zero(rows: tuple[int, ...]) -> None:
    output = ops.linear(jnp.ones((*rows, 0)), jnp.ones((0, 4)), bias=jnp.full(4, 2.0))
    assert output.shape == (*rows, 4) and jnp.all(output == 2)
    gated = ops.gated_linear_unit(jnp.ones((*rows, 0)), jnp.ones((0, 4)), jnp.ones((0, 4)))
    assert gated.shape == (*rows, 4) and not jnp.any(gated)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy_never_holds_all_logits(reduction: str) -> None:
    hidden, weight = jax.ShapeDtypeStruct((16384, 32), "float32"), jax.ShapeDtypeStruct((32, 32000), "float32")
    labels = jax.ShapeDtypeStruct((16384,), "int32")

    def total(hidden: Any, weight: Any, labels: Any) -> Any:
        return jnp.sum(ops.linear_cross_entropy(hidden, weight, labels, reduction=reduction))

    all_logits_bytes = 16384 * 32000 * 4
    assert _temporary_bytes(jax.value_and_grad(total, argnums=(0, 1)), hidden, weight, labels) < all_logits_bytes / 6


def test_cross_entropy_without_gradient_forms_one_product_a_chunk() -> None:
    hidden, weight, labels = jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.zeros(8, jnp.int32)
    assert str(jax.make_jaxpr(ops.linear_cross_entropy)(hidden, weight, labels)).count("dot_general") <= 2
    forward = jax.jit(ops.linear_cross_entropy).lower(hidden, weight, labels).as_text()
    gradient = jax.jit(jax.grad(ops.linear_cross_entropy, argnums=(0, 1))).lower(hidden, weight, labels).as_text()
    assert forward.count("dot_general") == 1
    assert gradient.count("dot_general") == 3


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_tied_head_trains_in_every_dtype(dtype: str, reduction: str) -> None:
    embedding = jax.random.normal(jax.random.key(0), (257, 48)).astype(dtype)
    labels = jnp.arange(66).reshape(2, 33)

    def loss(embedding: Any) -> Any:
        return jnp.mean(ops.linear_cross_entropy(embedding[labels], embedding.T, labels, reduction=reduction))

    gradient = jax.jit(jax.grad(loss))(embedding)
    assert gradient.dtype == dtype
    assert bool(jnp.all(jnp.isfinite(gradient.astype(jnp.float32))))


def test_a_label_outside_the_vocabulary_is_not_ignored_silently() -> None:
    hidden, weight = jnp.ones((3, 4)), jnp.ones((4, 16))
    losses = ops.linear_cross_entropy(hidden, weight, jnp.array([16, -1, -100]), reduction="none")
    assert jnp.array_equal(jnp.isnan(losses), jnp.array([True, True, False]))
    assert float(losses[2]) == 0.0


@pytest.mark.parametrize("op", ["linear", "norm", "rope", "gated_linear_unit", "attention"])
def test_forward_mode_works_in_fp32(op: str) -> None:
    x, weight = jnp.ones((2, 4, 2, 8)), jnp.ones((8, 3))
    core: Any = {"implementation": "reference"}
    calls = {
        "linear": lambda x: ops.linear(x, weight, **core),
        "norm": lambda x: ops.norm(x, **core),
        "rope": lambda x: ops.rope(x, jnp.zeros((2, 4), jnp.int32), **core),
        "gated_linear_unit": lambda x: ops.gated_linear_unit(x, weight, weight, **core),
        "attention": lambda x: ops.attention(x, x, x, causal=True, **core),
    }
    _, tangent = jax.jvp(calls[op], (x,), (x,))
    assert bool(jnp.all(jnp.isfinite(tangent)))


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 0), (0, 1), (1, 1), (0, None), (None, 0)])
def test_bf16_products_run_under_any_vmap(in_axes: tuple[int | None, int | None]) -> None:
    x = jnp.ones((8, 8, 16) if in_axes[0] is not None else (8, 16), jnp.bfloat16)
    weight = jnp.ones((16, 16, 24) if in_axes[1] == 1 else (8, 16, 24), jnp.bfloat16)
    weight = weight[:, :8] if in_axes[1] == 1 else weight
    weight = weight if in_axes[1] is not None else weight[0]
    batched = jax.vmap(lambda x, w: ops.linear(x, w, preferred_dtype=jnp.float32), in_axes=in_axes)

    def total(x: Any, weight: Any) -> Any:
        return jnp.sum(batched(x, weight))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(x, weight)
    assert all(bool(jnp.all(jnp.isfinite(gradient.astype(jnp.float32)))) for gradient in gradients)


@pytest.mark.covering
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)])
@pytest.mark.parametrize("further_axes", [(0, 0), (0, None), (None, 0)])
def test_bf16_products_of_heads_run_where_one_operand_is_mapped(in_axes: Any, further_axes: Any) -> None:
    """XLA's CPU backend refuses such products, when they run, where a mapped axis is before that of the heads."""

    def operand(at: int, *shape: int) -> Any:
        sizes = [size for size, axes in ((3, further_axes), (4, in_axes)) if axes[at] == 0]
        return jax.random.normal(jax.random.key(at), (*sizes, *shape), jnp.bfloat16)

    def total(product: Any, *operands: Any) -> tuple[Any, Any]:
        found = jax.vmap(jax.vmap(product, in_axes), further_axes)(*operands)
        return jnp.sum(jnp.sin(found)), found

    def contracted(query: Any, key: Any) -> Any:
        return contract("hqd,hkd->hqk", query, key, jnp.float32)

    def exact(query: Any, key: Any) -> Any:
        return jnp.einsum("hqd,hkd->hqk", query, key)

    operands = operand(0, 2, 8, 16), operand(1, 2, 12, 16)
    gradients, found = jax.jit(jax.grad(functools.partial(total, contracted), (0, 1), has_aux=True))(*operands)
    wide = [array.astype(jnp.float32) for array in operands]
    expected_gradients, expected = jax.grad(functools.partial(total, exact), (0, 1), has_aux=True)(*wide)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for gradient, of_exact in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient.astype(jnp.float32), of_exact, atol=0.01 * jnp.max(jnp.abs(of_exact)))
