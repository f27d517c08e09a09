"""Transformed models and preferences in pipeline stages; `test_stages.py` runs this in a process with eight devices.

Its arguments are a directory and names of cases.
"""

import dataclasses
import math
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.config import parse
from stack_core.abi.metrics import Metric
from stack_core.ops.building import is_quantized
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.run.config import RunConfig, RunSettings
from stack_train.run.program import build_program
from stack_train.run.train import train

ROWS, SEQ, MICROBATCHES = 8, 16, 2
MODEL = {"name": "llama", "layers": 4, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "dtype": "float32"}
MODEL |= {"vocab_size": 280, "initializer_std": 0.2}
MIXTURE = MODEL | {"name": "mixtral", "experts": 4, "active_experts": 2}
LORA = {"rules": [{"path": "blocks", "rank": 4}], "seed": 3}
W8 = {"path": "blocks", "weights": "int8"}
CODES, NF4 = {"rules": [W8]}, {"rules": [W8 | {"weights": "nf4", "tile_size": 16, "double_quantized": True}]}
QAT = {"method": "qat", "rules": [W8 | {"activations": "int8"}]}
# Without a type of gradients, nothing is rounded stochastically.
QT = {"method": "qt", "rules": [W8 | {"activations": "int8"}]}
BY_TWO, INTERLEAVED = {"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2}
CASES = {
    "codes": ({"quant": CODES, "lora": LORA}, {"stage": 2, "fsdp": 2}, BY_TWO),
    "qat": ({"quant": QAT}, {"stage": 2}, INTERLEAVED),
    "qt": ({"quant": QT}, {"stage": 2}, BY_TWO),
    "dpo": ({"objective": {"name": "dpo", "beta": 0.5}}, {"stage": 2, "data": 2}, BY_TWO),
    "floats": ({"lora": LORA}, {"stage": 2, "tensor": 2}, INTERLEAVED),
    "dora": ({"lora": LORA | {"rules": [{"path": "blocks", "rank": 4, "magnitude": True}]}}, {"stage": 4}, BY_TWO),
    "nf4": ({"quant": NF4, "lora": LORA}, {"stage": 2, "data": 2}, {"schedule": "gpipe"}),
    "experts": ({"model": MIXTURE, "quant": CODES, "lora": LORA}, {"stage": 2, "expert": 2}, BY_TWO),
    "kto": ({"objective": {"name": "kto"}}, {"stage": 2, "data": 2}, BY_TWO),
    "reward_model": ({"objective": {"name": "reward_model"}}, {"stage": 2, "fsdp": 2}, INTERLEAVED),
}


def config_of(folder, sections, mesh, pipeline):
    """The config of a run, whose microbatches are accumulated on one device and divided by stages."""
    settings = {"pipeline": pipeline | {"microbatches": MICROBATCHES}} if pipeline else {"accumulation_steps": 2}
    kinds = {"dpo": "preferences", "reward_model": "preferences", "kto": "judged"}
    name = kinds.get(sections.get("objective", {}).get("name"), "text")
    source = f"text:{folder}/text.txt" if name == "text" else f"{folder}/absent.jsonl"
    data = {"name": name, "source": source, "seq_tokens": SEQ, "batch_size": ROWS, "validation_fraction": 0.0}
    fields = {"output": str(folder / "run"), "model": MODEL, "mesh": {"fsdp": 1, **mesh}}
    fields |= {"data": data | ({"vocab_size": 280} if name == "text" else {}), "run": {"steps": 4, **settings}}
    fields |= {"optimizer": {"name": "sgd", "learning_rate": 0.1, "schedule": {"decay": "constant"}}}
    return parse(RunConfig, fields | {"checkpoint": {"every_steps": 2, "keep": 4}} | sections)


def batch_of(spec, scores=None):
    """Packed rows with several documents and different numbers of targets.

    With some seeds a value lies on a boundary of rounding, and the last bit of an earlier step decides it.
    """
    rng = np.random.default_rng(1)
    shape = spec["tokens"].shape
    tokens = rng.integers(0, 280, (*shape[:-1], SEQ + 1), dtype=np.int32)
    targets = tokens[..., 1:].copy()
    targets[::3, ..., : SEQ // 2] = -100
    segments = np.where(np.arange(SEQ) < rng.integers(1, SEQ, (*shape[:-1], 1)), 1, 2).astype(np.int32)
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape).copy()
    batch = {"tokens": tokens[..., :-1], "targets": targets, "positions": positions, "segment_ids": segments}
    if "reference_logprobs" in spec:
        batch["reference_logprobs"] = scores
    if "desirable" in spec:
        batch["desirable"] = (np.arange(ROWS) % 3 > 0).astype(np.float32)
    return batch


def scored(program, start, batch):
    """Log-probabilities of the answers, as data scores them under the initial weights."""
    rows = {name: batch[name].reshape(-1, SEQ) for name in ("tokens", "targets", "positions", "segment_ids")}
    state, arrays = jax.device_put((start, rows), (program.state_shardings, program.batch_shardings(rows)))
    found = program.compiled_scores()(program.step.variables(state), arrays)["logprobs"]
    return np.asarray(found).sum(axis=-1).reshape(batch["tokens"].shape[:-1])


def results(program, start, batch, *, is_evaluated):
    """Metrics and state after each of two steps; the momentum after the first is the clipped gradient."""
    state, arrays = jax.device_put((start, batch), (program.state_shardings, program.batch_shardings(batch)))
    found = []
    if is_evaluated:
        auxiliary = program.step.evaluation_auxiliary(state)
        found.append(program.compile_evaluation(batch)(program.step.variables(state), arrays, auxiliary))
    update, state = program.compile(batch), jax.tree.map(jnp.copy, state)  # a step donates its state
    for _ in range(2):
        state, metrics = update(state, arrays)
        found.append(jax.device_get((metrics, state.params, state.opt_state, state.auxiliary)))
        assert float(found[-1][0].pop("dropped", 0)) == 0, "only meshes with an axis of experts drop tokens"
    is_metric = lambda x: isinstance(x, Metric)
    return jax.tree.map(lambda x: float(x) if is_metric(x) else x, found, is_leaf=is_metric)


def check(name, folder):
    sections, mesh, pipeline = CASES[name]
    single = build_program(config_of(folder, sections, {"data": 1}, None), jax.devices()[:1])
    config = config_of(folder, sections, mesh, pipeline)
    staged = build_program(config, jax.devices()[: math.prod(mesh.values())])
    start = single.init(key=jax.random.key(0))
    has_codes = any(map(is_quantized, jax.tree.leaves(start.frozen, is_leaf=is_quantized)))
    assert has_codes == (name in ("codes", "nf4", "experts")), name
    # Other values than at the start, where factors and heads are 0 and others have no gradient.
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
    auxiliary = {
        name: dataclasses.replace(each, params=jax.tree.map(noise, each.params))
        for name, each in start.auxiliary.items()
    }
    start = dataclasses.replace(start, params=jax.tree.map(noise, start.params), auxiliary=auxiliary)
    batch = batch_of(config.batches.spec(config.model), 0)
    if "reference_logprobs" in batch:
        scores = scored(single, start, batch)
        np.testing.assert_allclose(scored(staged, start, batch), scores, rtol=1e-5, err_msg=name)
        batch["reference_logprobs"] = scores + np.random.default_rng(1).normal(size=scores.shape).astype(np.float32)
    few = {"is_evaluated": name in ("dpo", "dora", "nf4")}
    expected, found = results(single, start, batch, **few), results(staged, start, batch, **few)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), expected[-2][1], jax.device_get(start.params))
    assert min(jax.tree.leaves(moved)) > 1e-6, name
    for (path, one), several in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        where = f"{name}: {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-5, err_msg=where)


def resume(folder):
    """A run with adapters on codes resumes in stages bit for bit."""
    sections, _, pipeline = CASES["codes"]
    base = config_of(folder, {}, {"fsdp": 8}, None)
    train(dataclasses.replace(base, run=RunSettings(steps=1)))
    one = config_of(folder, sections, {"stage": 2, "fsdp": 4}, pipeline)
    settings = dataclasses.replace(one.run, init_from=base.output)
    whole, cut = (dataclasses.replace(one, output=str(folder / name), run=settings) for name in ("whole", "cut"))
    train(whole)
    shutil.copytree(whole.output, cut.output)
    shutil.rmtree(Path(cut.output) / "checkpoints" / "00000004")
    train(cut, resume=True)
    states = []
    for config in (whole, cut):
        saved = dataclasses.replace(build_program(config).abstract_state, frozen={})
        with CheckpointStore(Path(config.output) / "checkpoints") as store:
            states.append(named_leaves(store.restore(saved, 4).state.params))
    assert states[0].keys() == states[1].keys() and all("lora/" in name for name in states[0])
    for name, leaf in states[0].items():
        np.testing.assert_array_equal(leaf, states[1][name], err_msg=name)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}, and why? " for n in range(300)))
    for chosen in sys.argv[2:]:
        resume(folder) if chosen == "resume" else check(chosen, folder)
