"""The gradient of every algorithm has no array of batch x tokens x vocabulary."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_rl.experience import batch_shapes
from stack_rl.objectives import policy
from stack_rl.objectives.sampled import SampledFigures
from stack_rl.objectives.scalar import ScalarHead

from .test_algorithms import ALGORITHMS, EMBED
from .test_policy import RunningSum

# Four chunks of 512 tokens, of which implementations may have all logits.
ROWS, SEQ, VOCAB = 8, 256, 1 << 16


def largest_array(algorithm) -> int:
    """Returns the number of entries of the largest array in the gradient, of which nothing is computed."""
    shapes = batch_shapes(ROWS, SEQ, algorithm)
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((VOCAB, EMBED), (EMBED, VOCAB))]

    def gradient(params, batch):
        auxiliary = {"reference": RunningSum(*params)} if "reference" in algorithm.build().auxiliary_models else {}
        if algorithm.has_critic:
            auxiliary["critic"] = ScalarHead(SimpleNamespace(embed=EMBED), key=jax.random.key(0))
        loss = lambda params: algorithm.build()(RunningSum(*params), batch, key=jax.random.key(0), **auxiliary)[0]
        return jax.grad(loss)(params)

    found = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", str(jax.make_jaxpr(gradient)(params, shapes)))
    return max(math.prod(map(int, shape.split(","))) for shape in found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_array_has_all_logits_of_a_batch(name):
    algorithm = replace(ALGORITHMS[name], entropy=0.01)
    assert VOCAB * EMBED <= largest_array(algorithm) < ROWS * SEQ * VOCAB


def test_all_logits_of_a_batch_would_be_found(monkeypatch):
    def whole(head, hidden, batch, *, entropies=False):
        logprobs = jax.nn.log_softmax(head.logits(hidden))
        targets = jax.numpy.where(batch["targets"] == IGNORED_TARGET, 0, batch["targets"])
        return SampledFigures(jax.numpy.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], None)

    monkeypatch.setattr(policy, "sampled_figures", whole)
    assert largest_array(ALGORITHMS["grpo"]) >= ROWS * SEQ * VOCAB
