"""Residual streams against NumPy in float64, token by token, with gradients by differences of the latter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_train.nn.build import Build
from stack_train.nn.hyper_connections import HyperConnections, StreamHead, balanced_matrix
from stack_train.nn.residual import Norm

EMBED, STREAMS, TOKENS = 5, 3, (2, 4)
SPEC = HyperConnections(streams=STREAMS, iterations=3, epsilon=1e-3)
EPSILON = 1e-2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(*TOKENS, STREAMS * EMBED))
OUTPUT = RANDOM.normal(size=(*TOKENS, EMBED))


def builder():
    return Build(EMBED, 1, 0.5, 0.5, Norm(epsilon=EPSILON), "float32", jax.random.key(0))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def arrays_of(module):
    """Random values of the parameters P, c and s."""
    sizes = (module.project.kernel.shape[-2:], module.bias.shape[-1:], module.scale.shape[-1:])
    return [RANDOM.normal(size=size) for size in sizes]


def with_arrays(module, arrays):
    graph, _ = nnx.split(module)
    values = dict(zip((("project", "kernel"), ("bias",), ("scale",)), arrays, strict=True))
    return nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(values)))


def products(x, kernel):
    return x / np.sqrt(np.mean(np.square(x)) + EPSILON) @ kernel


def mixed_by_hand(x, output, kernel, bias, scale):
    """The sublayer's input and the new streams of each token."""
    reads, streams = np.zeros(OUTPUT.shape), np.zeros(X.shape)
    for token in np.ndindex(TOKENS):
        h, old = products(x[token], kernel), x[token].reshape(STREAMS, EMBED)
        parts = np.split(h, [STREAMS, 2 * STREAMS]), np.split(bias, [STREAMS, 2 * STREAMS])
        read, write, mix = (s * own + c for s, own, c in zip(scale, *parts, strict=True))
        mix = np.exp(mix.reshape(STREAMS, STREAMS))
        mix = mix / mix.sum(axis=1, keepdims=True) + SPEC.epsilon
        mix = mix / (mix.sum(axis=0, keepdims=True) + SPEC.epsilon)
        for _ in range(SPEC.iterations - 1):
            mix = mix / (mix.sum(axis=1, keepdims=True) + SPEC.epsilon)
            mix = mix / (mix.sum(axis=0, keepdims=True) + SPEC.epsilon)
        reads[token] = (sigmoid(read) + SPEC.epsilon) @ old
        new = [
            2 * sigmoid(write[k]) * output[token] + sum(mix[j, k] * old[j] for j in range(STREAMS)) for k in range(3)
        ]
        streams[token] = np.concatenate(new)
    return np.concatenate([reads, streams], axis=-1)


def collapsed_by_hand(x, kernel, bias, scale):
    found = np.zeros(OUTPUT.shape)
    for token in np.ndindex(TOKENS):
        weights = sigmoid(scale * products(x[token], kernel) + bias) + SPEC.epsilon
        found[token] = weights @ x[token].reshape(STREAMS, EMBED)
    return found


def check(by_hand, function, *arguments):
    """Compares values, and the gradient along a random direction of all arguments with a central difference."""
    expected = by_hand(*arguments)
    cotangent, directions = RANDOM.normal(size=expected.shape), [RANDOM.normal(size=each.shape) for each in arguments]
    narrow = [jnp.asarray(each, jnp.float32) for each in arguments]
    found, gradients = jax.jit(
        jax.value_and_grad(
            lambda *each: (jnp.vdot(jnp.float32(cotangent), out := function(*each)), out), range(len(narrow)), True
        )
    )(*narrow)
    np.testing.assert_allclose(found[1], expected, atol=2e-6, rtol=2e-6)
    ahead, behind = (
        np.vdot(cotangent, by_hand(*[each + step * way for each, way in zip(arguments, directions, strict=True)]))
        for step in (1e-5, -1e-5)
    )
    slope = sum(np.vdot(way, np.asarray(each, float)) for way, each in zip(directions, gradients, strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=2e-5)


def test_a_sublayer_reads_and_writes_all_streams_with_weights_of_the_token():
    module = SPEC.build(builder())

    def mixed(x, output, *arrays):
        layer = with_arrays(module, arrays)
        read, weights = layer.read(x)
        return jnp.concatenate([read, layer.write(x, output, weights)], axis=-1)

    check(mixed_by_hand, mixed, X, OUTPUT, *arrays_of(module))


def test_the_head_expands_embeddings_and_sums_streams():
    module = StreamHead(SPEC, builder())
    check(collapsed_by_hand, lambda x, *arrays: with_arrays(module, arrays).collapse(x), X, *arrays_of(module))
    np.testing.assert_array_equal(module.expand(jnp.ones((1, 1, 2)).at[0, 0, 1].set(7)), [[[1, 7] * STREAMS]])


@pytest.mark.parametrize("iterations", [1, 20])
def test_mixing_weights_become_doubly_stochastic(iterations):
    matrix = balanced_matrix(jnp.asarray(RANDOM.normal(size=(7, 4, 4)), jnp.float32), iterations, 1e-6)
    np.testing.assert_allclose(jnp.sum(matrix, axis=-2), 1, atol=1e-5)
    error = jnp.max(jnp.abs(jnp.sum(matrix, axis=-1) - 1))
    assert error > 0.1 if iterations == 1 else error < 1e-5
