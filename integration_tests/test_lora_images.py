"""Runs of models of images with `quant:` and `lora:`: a frozen base in nf4, and adapters that alone are trained."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.ops.building import is_quantized
from stack_quant.packing import stored_bytes
from stack_train.checkpoint import named_leaves
from stack_train.commands.convert import convert
from stack_train.diffusion import autoencoder_kl, dit, flux, sd3
from stack_train.diffusion.components import load_component
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import open_images
from stack_train.run.config import RunConfig, run_config
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.weights import read_model

pytestmark = pytest.mark.slow  # two runs a family

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
SQUARES = {"image_size": 8, "channels": 1, **FLOATS}
TEXT = {"text_tokens": 4, "text_dim": 32, "pooled_dim": 32}
FAMILIES = {
    "dit": {"classes": 10, "layers": 2, "heads": 2, "head_dim": 16, **SQUARES},
    "flux": {"double_layers": 1, "single_layers": 2, "heads": 2, "head_dim": 16, "rope_axes": [4, 6, 6]}
    | {"guidance": None, **TEXT, **SQUARES},
    "sd3": {"layers": 3, "dual_layers": 1, "heads": 2, "head_dim": 16, "max_patches": 5, **TEXT, **SQUARES},
    "autoencoder_kl": {"latent_channels": 2, "widths": [8, 16], "groups": 4, "blocks_per_level": 1, **SQUARES},
}
COMPONENTS = {module.COMPONENT.family.name: module.COMPONENT for module in (dit, flux, sd3, autoencoder_kl)}
NF4 = {"path": ".*", "weights": "nf4", "tile_size": 16, "smaller_tiles": True, "double_quantized": True}
QLORA = {"quant": {"rules": NF4}, "lora": {"rules": {"path": ".*", "rank": 2}}}


def batches(family):
    """Squares with one lit column, and what else a family reads."""
    rng, rows = np.random.default_rng(0), 4
    for _ in range(4):
        labels = rng.integers(0, 8, rows).astype(np.int32)
        images = np.full((rows, 8, 8, 1), -1.0, np.float32)
        images[np.arange(rows), :, labels] = 1.0
        batch = {"images": images, "weights": np.ones(rows, np.float32)}
        if family == "dit":
            batch["labels"] = labels
        if family in ("flux", "sd3"):
            batch["text"] = rng.normal(size=(rows, TEXT["text_tokens"], TEXT["text_dim"])).astype(np.float32)
            batch["pooled"] = rng.normal(size=(rows, TEXT["pooled_dim"])).astype(np.float32)
        yield batch


def run_of(output, family, *, steps, init_from=None, **sections):
    """Trains a run; returns its directory."""
    objective = "reconstruction" if family == "autoencoder_kl" else "flow_matching"
    source = f"{__name__}:batches"
    config = {
        "output": str(output),
        "model": {"name": family, **FAMILIES[family]},
        "data": {"name": "arrays", "source": source, "validation": source, "options": {"family": family}},
        "objective": {"name": objective},
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.0, "schedule": {"warmup_steps": 0}},
        "run": {"steps": steps, "init_from": init_from, "evaluate_every_steps": 0},
        **sections,
    }
    train(parse(RunConfig, config))
    return Path(output)


def evaluated(run):
    """The loss of held-out batches at a run's end."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in found if record["kind"] == "evaluation"][-1]


def said(model, family):
    """What a model makes of a batch."""
    return np.asarray(model.on_batch(jax.tree.map(jnp.asarray, next(batches(family)))))


def model_of(run):
    return read_model(run, run_config(run))[0]


@pytest.fixture(scope="module", params=list(FAMILIES))
def tuned(request, tmp_path_factory):
    """A family, a run of it, and one that began there with its base in nf4 and adapters."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    base = run_of(root / "base", family, steps=8)
    return family, base, run_of(root / "tuned", family, steps=40, init_from=str(base), **QLORA)


def test_the_base_stays_in_nf4_and_the_adapters_alone_learn(tuned):
    family, base, run = tuned
    state = build_program(run_config(run)).abstract_state
    names = named_leaves(state.params)
    assert names and all(name.startswith("lora/") for name in names)
    frozen = [leaf for leaf in jax.tree.leaves(state.frozen, is_leaf=is_quantized) if is_quantized(leaf)]
    assert frozen and all("nf4" in leaf.scheme for leaf in frozen)
    sizes = {leaf.shape: sum(map(stored_bytes, jax.tree.leaves(leaf))) / np.prod(leaf.shape) for leaf in frozen}
    assert min(sizes.values()) <= 0.6, sizes
    assert evaluated(run) < 0.97 * evaluated(base)
    assert np.abs(said(model_of(run), family) - said(model_of(base), family)).max() > 0.01


def test_adapters_are_merged_into_what_diffusers_opens(tuned, tmp_path):
    family, _, run = tuned
    convert(str(run), f"hf:{tmp_path / 'merged'}")
    _, merged = load_component(COMPONENTS[family], tmp_path / "merged")
    np.testing.assert_allclose(said(merged, family), said(model_of(run), family), atol=1e-5)


@pytest.mark.parametrize("tuned", ["dit"], indirect=True)  # images of texts need encoders
def test_it_makes_images(tuned):
    _, _, run = tuned
    images = open_images(str(run)).images([1, 2], SamplerConfig(steps=2))
    assert images.shape == (2, 8, 8, 1) and images.std() > 0
