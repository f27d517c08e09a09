"""Attention to selected keys and the loss of the indexer beside the formulas of their paper, in float64."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.ops import selection
from stack_core.ops.selection import (
    KeySelection,
    attend_selected,
    attend_selected_with_loss,
    index_loss,
    index_scores,
    selected_keys,
)

BATCH, SEQ, HEADS, DIM, VALUE_DIM, INDEX_HEADS, INDEX_DIM, COUNT = 2, 23, 3, 6, 5, 7, 4, 5
HELD = ("batch", "seq", "act_heads", None)
AXES = {"query": HELD, "key": HELD, "value": HELD}
SCALE = 0.4


def operands() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "query": (BATCH, SEQ, HEADS, DIM),
        "key": (BATCH, SEQ, HEADS, DIM),
        "value": (BATCH, SEQ, HEADS, VALUE_DIM),
        "index_query": (BATCH, SEQ, INDEX_HEADS, INDEX_DIM),
        "weights": (BATCH, SEQ, INDEX_HEADS),
        "index_key": (BATCH, SEQ, INDEX_DIM),
    }
    return {name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()}


def segments_of(lengths: list[int]) -> Any:
    return jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=SEQ)[None].repeat(BATCH, 0)


def expected_mask(index_query: Any, weights: Any, index_key: Any, segments: Any) -> np.ndarray:
    """The keys that each query selects, one query at a time."""
    products = np.maximum(np.einsum("bqhd,bkd->bqhk", index_query, index_key), 0)
    scores = np.einsum("bqh,bqhk->bqk", weights, products)
    mask = np.zeros(scores.shape, bool)
    for row, query in np.ndindex(BATCH, SEQ):
        seen = [key for key in range(query + 1) if segments is None or segments[row, key] == segments[row, query]]
        best = sorted(seen, key=lambda key, of=scores[row, query]: -of[key])[:COUNT]  # a stable order
        mask[row, query, best] = True
    return mask


def by_formula(query: Any, key: Any, value: Any, mask: Any) -> Any:
    logits = jnp.where(mask[:, None], SCALE * jnp.einsum("bqhd,bkhd->bhqk", query, key), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)


@pytest.mark.parametrize("lengths", [None, [4, 12, 7]], ids=["one document", "packed"])
@pytest.mark.parametrize("block_bytes", [2**26, 4 * BATCH * SEQ * 9], ids=["one block", "blocks of 8 queries"])
def test_values_and_gradients_are_those_of_the_formula(
    lengths: Any, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_BLOCK_BYTES", block_bytes)
    with jax.enable_x64(True):
        given = operands()
        segments = None if lengths is None else segments_of(lengths)
        mask = expected_mask(*(np.asarray(given[name]) for name in ("index_query", "weights", "index_key")), segments)
        positions = jnp.broadcast_to(jnp.arange(SEQ), (BATCH, SEQ))
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=given["value"].shape))

        def loss(given: Any) -> Any:
            chosen = KeySelection(
                query=given["index_query"], weights=given["weights"], key=given["index_key"], count=COUNT
            )
            arrays = (given[name] for name in ("query", "key", "value"))
            pair = None if segments is None else (segments, segments)
            options: Any = {"positions": positions, "segments": pair, "scale": SCALE, "axes": AXES}
            output = attend_selected(*arrays, chosen, **options)
            return jnp.sum(output * cotangent), output

        def expected_loss(*arrays: Any) -> Any:
            output = by_formula(*arrays, mask)
            return jnp.sum(output * cotangent), output

        (_, output), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
        arrays = [given[name] for name in ("query", "key", "value")]
        (_, expected), expected_gradients = jax.value_and_grad(expected_loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
        np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-12)
        for name, gradient in zip(("query", "key", "value"), expected_gradients, strict=True):
            np.testing.assert_allclose(gradients[name], gradient, rtol=1e-11, atol=1e-11, err_msg=name)
        for name in ("index_query", "weights", "index_key"):
            assert not gradients[name].any(), name


def loss_by_formula(given: dict[str, Any], mask: np.ndarray) -> Any:
    """The divergence of each query's index scores from the normalized sum of the heads' probabilities, under a mask."""
    products = jnp.maximum(jnp.einsum("bqhd,bkd->bqhk", given["index_query"], given["index_key"]), 0)
    scores = jnp.where(mask, jnp.einsum("bqh,bqhk->bqk", given["weights"], products), -1e300)
    logits = jnp.where(mask[:, None], SCALE * jnp.einsum("bqhd,bkhd->bhqk", given["query"], given["key"]), -1e300)
    summed = jnp.sum(jax.nn.softmax(logits), axis=1)
    shares = jax.lax.stop_gradient(summed / jnp.sum(jnp.abs(summed), axis=-1, keepdims=True))
    ratios = jnp.log(jnp.where(mask, shares, 1)) - jnp.where(mask, jax.nn.log_softmax(scores), 0)
    return jnp.sum(shares * ratios, axis=-1), shares


@pytest.mark.parametrize("of_all", [True, False], ids=["all keys", "selected keys"])
@pytest.mark.parametrize("block_bytes", [2**26, 4 * BATCH * SEQ * 9], ids=["one block", "blocks of 8 queries"])
def test_the_loss_of_an_indexer_and_its_gradients_are_those_of_the_formula(
    of_all: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_BLOCK_BYTES", block_bytes)
    with jax.enable_x64(True):
        given, segments = operands(), segments_of([4, 12, 7])
        index = {name: given.pop(name) for name in ("index_query", "weights", "index_key")}
        chosen_keys = expected_mask(*map(np.asarray, index.values()), segments)
        visible = np.tril(np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None])
        visible[:, 9] = chosen_keys[:, 9] = False  # a query that sees no key
        places = jnp.broadcast_to(jnp.arange(SEQ), (BATCH, SEQ)).at[:, 9].set(-1)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, SEQ)))
        cotangent = jnp.asarray(np.random.default_rng(2).normal(size=given["value"].shape))
        options: Any = {"positions": places, "segments": (segments, segments), "scale": SCALE, "axes": AXES}

        def loss(index: Any, given: Any) -> Any:
            operands = {"query": index["index_query"], "weights": index["weights"], "key": index["index_key"]}
            chosen = KeySelection(**operands, count=COUNT)
            if of_all:
                by_query, share = index_loss(given["query"], given["key"], chosen, **options)
                return jnp.sum(weights * by_query), (by_query, share)
            output, by_query = attend_selected_with_loss(
                given["query"], given["key"], given["value"], chosen, **options
            )
            return jnp.sum(weights * by_query) + jnp.sum(cotangent * output), (by_query, output)

        def plain(given: Any) -> Any:
            operands = {"query": index["index_query"], "weights": index["weights"], "key": index["index_key"]}
            chosen = KeySelection(**operands, count=COUNT)
            output = attend_selected(given["query"], given["key"], given["value"], chosen, **options)
            return jnp.sum(cotangent * output), output

        def expected_loss(index: Any) -> Any:
            found, shares = loss_by_formula({**given, **index}, visible if of_all else chosen_keys)
            return jnp.sum(weights * found), (found, jnp.sum(jnp.where(chosen_keys, shares, 0), axis=-1))

        differentiate = lambda function, *more: jax.value_and_grad(function, *more, has_aux=True)
        (_, found), (of_index, of_model) = jax.jit(differentiate(loss, (0, 1)))(index, given)
        (_, (by_query, share)), expected = differentiate(expected_loss)(index)
        close: Any = {"rtol": 1e-11, "atol": 1e-11}
        np.testing.assert_allclose(found[0], by_query, **close)
        for name, gradient in expected.items():
            np.testing.assert_allclose(of_index[name], gradient, err_msg=name, **close)
        # The rest of the model learns nothing from the loss, and its attention is the same.
        if of_all:
            np.testing.assert_allclose(found[1], share.at[:, 9].set(0), **close)
            assert not any(gradient.any() for gradient in of_model.values())
            return
        (_, output), of_plain = jax.jit(differentiate(plain))(given)
        np.testing.assert_array_equal(found[1], output)
        for name, gradient in of_plain.items():
            np.testing.assert_array_equal(of_model[name], gradient, err_msg=name)


@pytest.mark.parametrize("loss", [None, "of all keys", "of selected keys"])
def test_a_sequence_of_blocks_stores_no_array_of_all_queries_and_keys(
    loss: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the forward pass nor for the backward pass; attention itself computes in tiles."""
    rows, seq = 8, 96
    monkeypatch.setattr(selection, "_BLOCK_BYTES", 4 * BATCH * seq * rows)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    given = [shape(BATCH, seq, HEADS, DIM)] * 3
    index = [shape(BATCH, seq, INDEX_HEADS, INDEX_DIM), shape(BATCH, seq, INDEX_HEADS), shape(BATCH, seq, INDEX_DIM)]

    def total(query: Any, key: Any, value: Any, *index: Any) -> Any:
        chosen = KeySelection(query=index[0], weights=index[1], key=index[2], count=COUNT)
        positions = jnp.broadcast_to(jnp.arange(seq), (BATCH, seq))
        options: Any = {"positions": positions, "scale": None, "axes": AXES}
        if loss == "of all keys":
            return jnp.sum(index_loss(query, key, chosen, **options)[0])
        if loss == "of selected keys":
            output, by_query = attend_selected_with_loss(query, key, value, chosen, **options)
            return jnp.sum(output) + jnp.sum(by_query)
        return jnp.sum(attend_selected(query, key, value, chosen, **options))

    text = jax.jit(jax.grad(total, argnums=range(3 if loss is None else 6))).lower(*given, *index).as_text()
    assert f"{BATCH}x{rows}x{seq}xi1" in text
    for sizes in ((INDEX_HEADS, rows, seq), (INDEX_HEADS, BATCH, rows, seq)):  # one head of the indexer after another
        assert "x".join(map(str, sizes)) + "x" not in text
    sizes = [math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)", text)]
    assert max(sizes) < BATCH * seq * seq


def test_the_first_of_equal_scores_are_selected_and_hidden_keys_never() -> None:
    scores = jnp.array([[0.0, 3.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0], [2.0, -jnp.inf, 1.0, 1.0, 9.0]])
    visible = jnp.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    found = selected_keys(scores, visible, 3)
    np.testing.assert_array_equal(found, np.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0]], bool))
    np.testing.assert_array_equal(selected_keys(scores, visible, 5), visible)


def test_scores_of_zero_have_one_sign() -> None:
    """`lax.top_k` takes 0 before -0, and positions in order among equal scores."""
    query, key = -jnp.ones((1, 1, 1, 2)), jnp.ones((1, 3, 2))
    scores = index_scores(query, -jnp.ones((1, 1, 1)), key)
    assert not scores.any() and not jnp.signbit(scores).any()
