from typing import Any

import jax
import numpy as np

from stack_serve.llm.head_weights import HeadWeights
from stack_serve.llm.unstacking import layer_by_layer, split_layers

from .tiny_checkpoint import EMBED, TinyModel, random_params


class Checkpoint:
    model = TinyModel


def test_logits_need_the_head_alone() -> None:
    params = random_params()
    split = split_layers(params, jax.tree.map(lambda _: False, params) | {"layers": {"mix": True}})
    hidden = np.ones((3, EMBED), np.float32)
    checkpoint: Any = Checkpoint()
    head = HeadWeights(checkpoint, split, hidden)
    (kept,) = head.of(split)
    np.testing.assert_array_equal(kept, params["head"])
    restored = jax.jit(layer_by_layer(lambda arrays: TinyModel(head.restored(arrays)).logits(hidden)))
    np.testing.assert_allclose(restored((kept,)), TinyModel(params).logits(hidden), rtol=1e-6)
    assert jax.tree.structure(head.restored((kept,))) == jax.tree.structure(split)
