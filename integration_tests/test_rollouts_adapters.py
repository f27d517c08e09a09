"""RL with adapters: the engine gets the adapter alone, and the reference is the base."""

import json

import jax
import pytest

from stack_core.ops.building import is_quantized
from stack_train.checkpoint import named_leaves
from stack_train.run.program import build_trainer
from stack_train.run.train import train
from stack_train.static_engine import StaticEngine

from .test_rollouts import cell, records

LORA = ("lora.rules={path: blocks, rank: 2, alpha: 4}", "objective.kl=0.1", "run.evaluate_every_steps=0")


def size_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.fixture
def sent(monkeypatch):
    """The parameters of each update of the engine: their names and their bytes."""
    found, update = [], StaticEngine.update_weights

    def counted(engine, params, **options):
        before = named_leaves(engine._params)
        found.append((set(named_leaves(params)), size_bytes(params)))
        update(engine, params, **options)
        after = named_leaves(engine._params)
        assert after.keys() == before.keys()
        stayed = [name for name in before if name not in found[-1][0]]
        assert stayed and all(after[name] is before[name] for name in stayed)

    monkeypatch.setattr(StaticEngine, "update_weights", counted)
    return found


NF4 = ("quant={rules: {path: blocks, weights: nf4, tile_size: 16}}",)


@pytest.mark.parametrize("quant", [(), pytest.param(NF4, marks=pytest.mark.slow)], ids=["float", "nf4"])
def test_grpo_sends_the_adapter_alone_and_is_held_to_the_base(tmp_path, sent, quant):
    config = cell(tmp_path / "run", *quant, *LORA)
    train(config)
    trainer = build_trainer(config)
    state = trainer.abstract_state
    adapter = size_bytes(state.params)
    assert len(sent) == 9  # before the first step, and after each
    assert {size for _, size in sent} == {adapter} and adapter < 0.5 * size_bytes(state.frozen)
    assert all(names == set(named_leaves(state.params)) for names, _ in sent)
    assert bool(quant) == any(map(is_quantized, jax.tree.leaves(state.frozen, is_leaf=is_quantized)))
    steps = records(tmp_path / "run", "train")
    assert max(each["largest_mismatch"] for each in steps) < 1e-4  # the sampler has the trainer's weights
    divergences = [each["kl"] for each in steps]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6) and divergences[-1] > 0.0, json.dumps(steps[-1])
