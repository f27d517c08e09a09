"""RL with adapters: the engine gets the adapter alone, and the reference is the base."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from stack_core.ops.building import is_quantized
from stack_serve.llm.engine import LLMEngine
from stack_train.checkpoint import named_leaves
from stack_train.generation.static_engine import StaticEngine
from stack_train.run.program import build_program
from stack_train.run.train import train

from .test_rollouts import cell, records, write_untrained

LORA = ("lora.rules={path: blocks, rank: 2, alpha: 4}", "objective.kl=0.1", "run.evaluate_every_steps=0")


def size_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def holds_codes(tree):
    return any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


HELD = {StaticEngine: lambda engine: engine._params, LLMEngine: lambda engine: engine._programs._weights.params}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run whose model the adapters start from."""
    return write_untrained(tmp_path_factory.mktemp("runs") / "base")


@pytest.fixture
def sent(base, monkeypatch):
    """The parameters of each update of an engine: their names and bytes, and whether it holds quantized ones."""
    found = []

    def watch(engine_class, held):
        update = engine_class.update_weights

        def counted(engine, params, **options):
            before = named_leaves(held(engine))
            found.append((set(named_leaves(params)), size_bytes(params), holds_codes(held(engine))))
            update(engine, params, **options)
            after = named_leaves(held(engine))
            assert after.keys() == before.keys()
            # An engine may hold the layers of a parameter apart, under names that begin with the parameter's.
            stayed = [name for name in before if not name.startswith(tuple(found[-1][0]))]
            assert stayed and all(after[name] is before[name] for name in stayed)

        monkeypatch.setattr(engine_class, "update_weights", counted)

    for engine_class, held in HELD.items():
        watch(engine_class, held)
    return found


NF4 = ("quant={rules: {path: blocks, weights: nf4, tile_size: 16}}",)
SLOW = pytest.mark.slow


@pytest.mark.parametrize("engine", ["static", pytest.param("llm", marks=SLOW)])
@pytest.mark.parametrize("quant", [(), pytest.param(NF4, marks=SLOW)], ids=["float", "nf4"])
def test_grpo_sends_the_adapter_alone_and_is_held_to_the_base(tmp_path, base, sent, quant, engine):
    config = cell(tmp_path / "run", *quant, *LORA, f"data.engine={engine}", f"run.init_from={base}")
    train(config)
    program = build_program(config)
    state = program.abstract_state
    adapter = size_bytes(state.params)
    assert len(sent) == 9  # before the first step, and after each
    assert {size for _, size, _ in sent} == {adapter} and adapter < 0.5 * size_bytes(state.frozen)
    assert all(names == set(named_leaves(state.params)) for names, *_ in sent)
    assert {codes for *_, codes in sent} == {bool(quant)} == {holds_codes(state.frozen)}
    steps = records(tmp_path / "run", "train")
    assert max(each["largest_mismatch"] for each in steps) < 1e-4  # the sampler has the program's weights
    divergences = [each["kl"] for each in steps]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6) and divergences[-1] > 0.0, json.dumps(steps[-1])


# In a process of its own, since the wrappers that check types in tests cannot be pickled for the engine's process.
CHILD = """
import json, sys
from pathlib import Path
import jax
from stack_core.runtime.engine_process import EngineProcess
from stack_core.runtime.transfer import Transfers
from stack_train.run.program import build_program
from stack_train.run.train import train
sys.path.insert(0, {tests!r})
from test_rollouts import cell

offered, updates = [0], []
offer, update = Transfers.offer, EngineProcess.update_weights

def counted_offer(transfers, number, part):
    offered[0] += part.nbytes
    offer(transfers, number, part)

def counted_update(engine, params, **options):
    before = offered[0]
    update(engine, params, **options)
    updates.append((before, offered[0] - before))

Transfers.offer, EngineProcess.update_weights = counted_offer, counted_update
config = cell(Path(sys.argv[1]), *sys.argv[2:])
train(config)
adapter = build_program(config).abstract_state.params
print(json.dumps([updates, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(adapter))]))
"""


@SLOW  # runs with an engine in another process
@pytest.mark.parametrize(("engine", "quant"), [("static", NF4), ("llm", ())], ids=["static-nf4", "llm-float"])
def test_an_engine_in_another_process_gets_the_adapter_alone_by_the_transfer(tmp_path, base, engine, quant):
    """Counts the bytes that the trainer's process offers for transfer."""
    more = (f"data.engine={engine}", "data.engine_process={}", f"run.init_from={base}", "run.steps=3")
    command = [sys.executable, "-c", CHILD.format(tests=str(Path(__file__).parent)), str(tmp_path / "run")]
    done = subprocess.run([*command, *quant, *LORA, *more], check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    updates, adapter = json.loads(done.stdout.splitlines()[-1])
    before_first, _ = updates[0]
    assert before_first > 2 * adapter  # the whole model, once
    assert [size for _, size in updates] == [adapter] * 4
    steps = records(tmp_path / "run", "train")
    assert max(each["largest_mismatch"] for each in steps) < 1e-4 and len({each["loss"] for each in steps}) > 1
