"""A checkpoint published in bfloat16, trained, resumed, opened again and published: each in its dtype."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.errors import CheckpointError, ConfigError, StackError
from stack_train.checkpoint import CheckpointStore
from stack_train.checkpoint.manifest import read_manifest
from stack_train.huggingface import FORMAT
from stack_train.run.config import run_config
from stack_train.run.program import build_program
from stack_train.run.resolve import parse_run, resolve
from stack_train.run.train import train
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import init_state, read_params


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint(dtype="BF16", vocab_size=280, num_hidden_layers=1, max_position_embeddings=16)[0]


@pytest.fixture
def config_of(checkpoint, tmp_path):
    """Returns make(output, start, **sections): a run's config that names its start and nothing of its model."""
    FORMAT.import_run(checkpoint, tmp_path / "base")
    (tmp_path / "a.txt").write_text("one two three four five six seven eight nine ten " * 40)

    def make(output, start="base", steps=2, **sections):
        data = {"source": f"text:{tmp_path}/a.txt", "seq_tokens": 16, "batch_size": 2, "validation_fraction": 0.0}
        run = {"steps": steps, "init_from": start if ":" in start else str(tmp_path / start)}
        optimizer = {"learning_rate": 1e-6, "schedule": {"decay": "constant"}}
        base = {"data": data, "run": run, "optimizer": optimizer, "checkpoint": {"every_steps": 1}}
        return parse_run({**base, "output": str(tmp_path / output), **sections})

    return make


def stored_dtypes(run, *, branch):
    with CheckpointStore(run / "checkpoints") as store:
        leaves = read_manifest(store.path(store.latest())).leaves
    return {record.spec.dtype for name, record in leaves.items() if name.startswith(branch)} - {"int32"}


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def test_a_published_checkpoint_is_trained_in_float32_and_published_in_its_own_dtype(config_of, tmp_path):
    tuned = tmp_path / "tuned"
    train(config_of("tuned"))
    assert stored_dtypes(tuned, branch="params/") == stored_dtypes(tuned, branch="opt_state/") == {"float32"}
    config = run_config(tuned)
    assert (config.model.param_dtype, config.precision.params) == ("bfloat16", "float32")

    # All of what was learned goes on to the next run; other readers get the dtype of the publication.
    wide = {path: np.dtype("float32") for path in flatten_mapping(read_params(tuned, config.model)[0])}
    masters, base = (
        flatten_mapping(read_params(tmp_path / name, config.model, dtypes=wide)[0]) for name in ("tuned", "base")
    )
    changed = np.concatenate([(masters[path] != base[path]).ravel() for path in base])
    assert changed.mean() > 0.94
    assert dtypes(read_params(tuned, config.model)[0]) == {"bfloat16"}
    assert dtypes(RUN_FORMAT.open_for_generation(tuned).load_params()) == {"bfloat16"}
    FORMAT.export_run(tuned, tmp_path / "published")
    tensors = dict(safetensors.deserialize((tmp_path / "published" / "model.safetensors").read_bytes()))
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert json.loads((tmp_path / "published" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    norm = np.frombuffer(tensors["model.norm.weight"]["data"], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(norm, np.asarray(masters["norm",]).astype(ml_dtypes.bfloat16))

    further = config_of("further", "tuned")
    assert further.model.param_dtype == "bfloat16"
    started = flatten_mapping(init_state(build_program(further), further, resolve(further).start)[0].params)
    assert all((started[path] == masters[path]).all() for path in masters)


def test_a_run_of_bfloat16_parameters_resumes_bit_by_bit_and_says_when_its_precision_changes(config_of, tmp_path):
    sections = {"precision": {"params": "bfloat16"}}
    whole, cut = config_of("whole", **sections), config_of("cut", **sections)
    train(whole)
    train(replace(cut, run=replace(cut.run, steps=1)))
    # As runs wrote it whose parameters had the published dtype without a choice.
    path = tmp_path / "cut" / "config.yaml"
    path.write_text(path.read_text().replace("precision:\n  params: bfloat16\n", ""))
    assert "precision" not in path.read_text()
    with pytest.raises(ConfigError, match=r"precision\.params: 'float32', not 'bfloat16'"):
        train(config_of("cut"), resume=True)
    train(cut, resume=True)
    expected, found = (read_params(tmp_path / name, whole.model)[0] for name in ("whole", "cut"))
    assert stored_dtypes(tmp_path / "cut", branch="params/") == {"bfloat16"}
    assert stored_dtypes(tmp_path / "cut", branch="opt_state/") == {"float32"}
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_starts_from_a_checkpoint_as_from_the_run_that_it_converts_to(config_of, tmp_path, checkpoint):
    direct, converted = config_of("direct", f"hf:{checkpoint}"), config_of("converted")
    assert (direct.model, direct.model.param_dtype) == (converted.model, "bfloat16")
    train(direct)
    train(converted)
    found, expected = (
        flatten_mapping(read_params(tmp_path / name, direct.model)[0]) for name in ("direct", "converted")
    )
    assert all((found[path] == expected[path]).all() for path in expected)
    assert train(config_of("direct", f"hf:{checkpoint}", steps=3), resume=True).step == 3


@pytest.mark.parametrize(
    ("start", "model", "message"),
    [
        ("hf:{}", {"rope_theta": 7.0}, r"differs from hf:.*\n  model\.rope_theta: 7\.0, not 10000\.0\n.*--allow model"),
        (
            "gguf:{}",
            {},
            r"from the directory of a run, or hf:DIR\. Convert first: stack convert gguf:.* RUN",
        ),
        ("hg:{}", {}, r"run\.init_from is 'hg:.*runs start from the directory of a run, or hf:DIR\.$"),
        ("hf:{}/none", {}, r"none is not a directory"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_anything_is_written(
    config_of, tmp_path, checkpoint, start, model, message
):
    with pytest.raises(StackError, match=message):
        train(config_of("refused", start.format(checkpoint), model=model))
    assert not (tmp_path / "refused").exists()


def test_parameters_of_another_shape_are_named(config_of, checkpoint):
    larger = config_of("larger", f"hf:{checkpoint}", model={"layers": 2})
    with pytest.raises(CheckpointError, match=r"Parameter .* of hf:.* has shape \(1, .*model expects \(2, "):
        train(larger, allow=["model.layers"])
