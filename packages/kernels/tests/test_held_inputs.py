"""Inputs that broke other libraries' kernels, tried with every registered implementation of the op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.plugins import registries

pytestmark = pytest.mark.filterwarnings("ignore:.* was named and runs forward, but not backward:RuntimeWarning")

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def implementations(op):
    return [name.partition("/")[2] for name in registries.ops.names() if name.startswith(f"{op}/")]


def run(function, *args):
    """Compiles and runs; what the implementation refuses is skipped with its reason."""
    try:
        return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.jit(function)(*args))
    except UnsupportedOp as refused:
        pytest.skip(str(refused))


def assert_close(actual, expected, dtype):
    """Compares each array's largest error with its largest entry."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(one - other).max() <= TOLERANCES[dtype] * np.abs(other).max()


VOCABULARIES = [
    *((size, "float32") for size in (1000, 151936)),
    *(pytest.param(size, "float32", marks=pytest.mark.slow) for size in (32000, 50257)),
    (50257, "bfloat16"),
    (1000, "float16"),
]


@pytest.mark.parametrize(("vocab", "dtype"), VOCABULARIES)
@pytest.mark.parametrize("name", implementations("linear_cross_entropy"))
def test_the_loss_knows_where_its_vocabulary_ends(name, vocab, dtype):
    rng = np.random.default_rng(vocab)
    hidden, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((5, 8), (8, vocab)))
    labels = jnp.asarray([0, vocab - 1, -100, *rng.integers(0, vocab, 2)], jnp.int32)

    def loss(hidden, weight):
        return ops.linear_cross_entropy(hidden, weight, labels, implementation=name)

    actual, gradients = run(jax.value_and_grad(loss, argnums=(0, 1)), hidden, weight)
    exact = (np.asarray(x, np.float64) for x in (hidden, weight))
    expected, expected_gradients = exact_loss(*exact, np.asarray(labels))
    assert_close(actual, expected, "float32")  # it is accumulated in fp32, whatever the operands
    assert_close(gradients, expected_gradients, dtype)


def exact_loss(hidden, weight, labels):
    """Mean loss and its gradients, from the definition."""
    logits = hidden @ weight
    log_partition = np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = (labels >= 0)[:, None] / (labels >= 0).sum()
    target = labels[:, None] == np.arange(weight.shape[1])
    loss = (counted * (log_partition - (target * logits).sum(-1, keepdims=True))).sum()
    cotangent = counted * (np.exp(logits - log_partition) - target)
    return loss, (cotangent @ weight.T, hidden.T @ cotangent)


def drawn_attention(batch=3, q_seq=5, kv_seq=133, dtype="float32"):
    rng = np.random.default_rng(0)
    sizes = ((batch, q_seq, 4, 16), (batch, kv_seq, 2, 16), (batch, kv_seq, 2, 16))
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", implementations("attention"))
def test_halves_of_the_keys_merge_to_the_whole(name, dtype):
    lengths = jnp.asarray([133, 40, 0])  # the second row has no key in the second half, the third none at all
    split, offset = 64, 128

    def whole(query, key, value, implementation):
        masking = {"causal": True, "query_offset": offset, "kv_lengths": lengths}
        return ops.attention(query, key, value, **masking, implementation=implementation)

    def merged(query, key, value):
        outputs, lses = [], []
        for start, stop in ((0, split), (split, key.shape[1])):
            output, lse = ops.attention(
                query,
                key[:, start:stop],
                value[:, start:stop],
                causal=True,
                query_offset=offset - start,
                kv_lengths=jnp.clip(lengths - start, 0, stop - start),
                return_lse=True,
                implementation=name,
            )
            outputs.append(output.astype(jnp.float32))
            lses.append(lse)
        most = jnp.maximum(*lses)
        shares = [jnp.exp(lse - jnp.where(jnp.isfinite(most), most, 0.0)) for lse in lses]
        total = sum(shares)
        total = jnp.where(total == 0, 1.0, total)
        return sum(output * (share / total)[..., None] for output, share in zip(outputs, shares, strict=True))

    operands = drawn_attention(dtype=dtype)
    output, gradients = run(with_gradients(merged), *operands)
    expected = run(with_gradients(lambda *operands: whole(*operands, implementation="reference")), *operands)
    assert_close((output, gradients), expected, dtype)
    assert not output[2].any() and not any(gradient[2].any() for gradient in gradients)


def with_gradients(function):
    """A function's output and the gradients of its sum, weighted unevenly."""

    def both(*operands):
        output, vjp = jax.vjp(function, *operands)
        return output, vjp(
            jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape).astype(output.dtype)
        )

    return both


@pytest.mark.parametrize("name", implementations("attention"))
def test_a_row_without_keys_stands_beside_one_that_has_five(name):
    query, key, value = drawn_attention(batch=2, q_seq=3, kv_seq=7)

    def attended(query, key, value):
        return ops.attention(query, key, value, kv_lengths=jnp.asarray([5, 0]), implementation=name)

    output, gradients = run(with_gradients(attended), query, key, value)
    reference = functools.partial(ops.attention, implementation="reference")
    alone = run(with_gradients(reference), query[:1], key[:1, :5], value[:1, :5])
    assert_close(output[:1], alone[0], "float32")
    assert_close(gradients[1][:1, :5], alone[1][1], "float32")
    assert not output[1].any() and not any(gradient[1].any() for gradient in gradients)
    assert not gradients[1][0, 5:].any() and not gradients[2][0, 5:].any()


@pytest.mark.covering
@pytest.mark.parametrize(("q_seq", "kv_seq"), [(5, 133), (133, 5)])
@pytest.mark.parametrize("name", implementations("attention"))
def test_a_window_stands_where_the_last_query_meets_the_last_key(name, q_seq, kv_seq):
    operands = drawn_attention(batch=1, q_seq=q_seq, kv_seq=kv_seq)
    distances = np.arange(q_seq)[:, None] + (kv_seq - q_seq) - np.arange(kv_seq)
    seen = jnp.asarray((distances >= -1) & (distances <= 3))[None, None]
    windowed = with_gradients(lambda *x: ops.attention(*x, window=(3, 1), implementation=name))
    masked = with_gradients(lambda *x: ops.attention(*x, mask=seen, implementation="reference"))
    assert_close(run(windowed, *operands), run(masked, *operands), "float32")


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", implementations("ragged_dot"))
def test_rows_beyond_the_last_group_are_zero_and_give_no_gradient(name, dtype):
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.normal(size=size), dtype) for size in ((53, 12), (4, 12, 20)))
    lhs = lhs.at[37:].set(1e4)  # whatever lies there
    sizes = jnp.asarray([30, 0, 7, 0], jnp.int32)
    multiplied = with_gradients(lambda lhs, rhs: ops.ragged_dot(lhs, rhs, sizes, implementation=name))
    output, (lhs_gradient, rhs_gradient) = run(multiplied, lhs, rhs)
    rows, expected = np.asarray(lhs, np.float64), np.zeros((53, 20))
    expected[:30], expected[30:37] = rows[:30] @ np.asarray(rhs[0], np.float64), rows[30:37] @ np.asarray(rhs[2], float)
    assert_close(output, expected, dtype)
    cotangent = np.asarray(jnp.cos(jnp.arange(53 * 20, dtype=jnp.float32)).reshape(53, 20).astype(dtype), np.float64)
    assert_close(rhs_gradient[[0, 2]], np.stack([rows[s].T @ cotangent[s] for s in np.s_[:30, 30:37]]), dtype)
    assert not output[37:].any() and not lhs_gradient[37:].any() and not rhs_gradient[[1, 3]].any()
