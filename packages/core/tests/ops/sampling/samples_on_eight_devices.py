"""Samples from logits whose vocabulary lies over eight devices, and compares with what one device gives.

The argument `all` adds vocabularies, and tokens of each.
"""

import itertools
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stack_core.abi.generation import SamplingParams
from stack_core.ops.sampling.sampling import SamplingSettings, sample

CHANGES = (
    {"temperature": 0.0, "logprobs": 5},
    {},
    {"top_k": 7},
    {"top_k": 200, "top_p": 0.8},
    {"top_p": 0.5, "min_p": 0.01, "logprobs": 20},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": {3: 5.0, 1000: 4.0}, "min_tokens": 30, "stop_tokens": (1, 5)},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": 0},
)


def main() -> None:
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    program = jax.jit(sample)
    rng = np.random.default_rng(0)
    rows = [
        SamplingSettings.row(SamplingParams(**changes), seed=(seed, 0), end_tokens=(0,), prompt_tokens=4)
        for changes, seed in itertools.product(CHANGES, range(2))
    ]
    settings = jax.tree.map(lambda *values: np.stack(values), *rows)
    every = "all" in sys.argv
    for vocab in (1024, 2000, 1504) if every else (2000,):
        logits = 2 * rng.normal(size=(len(rows), vocab)).astype(np.float32)
        history = rng.integers(0, vocab, size=(len(rows), 40)).astype(np.int32)
        sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        whole = NamedSharding(mesh, PartitionSpec())
        for length in range(4, 30, 1 if every else 5):
            lengths = np.full(len(rows), length, np.int32)
            one = program(logits, settings, history, lengths)
            other = program(sharded, *jax.device_put((settings, history, lengths), whole))
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.ranks, other.ranks)
            np.testing.assert_array_equal(one.top_tokens, other.top_tokens)
            np.testing.assert_array_equal(one.ok, other.ok)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
            np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=2e-5)


if __name__ == "__main__":
    main()
