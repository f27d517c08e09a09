"""Runs with a `lora:` section: what they train and store, how they resume, what they become, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from stack_core.abi.config import load_yaml, parse
from stack_core.abi.errors import CheckpointError, StackError
from stack_core.cli import main
from stack_core.ops.building import is_quantized
from stack_quant.packing import stored_bytes
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.run.config import RunConfig, run_config
from stack_train.run.program import build_program, traced_step
from stack_train.run.train import train
from stack_train.variables.weights import read_model, read_params

from .test_post_training import MODEL, TEMPLATE, jsonl, losses

EXAMPLE = Path(__file__).parents[1] / "examples" / "lora.yaml"
LAYERS, EMBED, WIDTH = 3, 64, 96
SIZES = {**MODEL, "layers": LAYERS, "embed": EMBED, "mlp": WIDTH}


def write(path: Path, mapping: dict) -> str:
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sections of a config: a base that was trained for two steps, and conversations about it."""
    root = tmp_path_factory.mktemp("chats")
    (root / "text.txt").write_text("user: red or blue? assistant: red. user: up or down? assistant: up. " * 20)
    source = {"source": f"text:{root}/text.txt", "vocab_size": 280, "seq_tokens": 32, "validation_fraction": 0.0}
    base = {"output": str(root / "base"), "model": SIZES, "data": source | {"batch_size": 4}, "run": {"steps": 2}}
    main(["train", write(root / "base.yaml", base)])
    (root / "template.jinja").write_text(TEMPLATE)
    words = ("red", "blue", "up", "down") * 4
    talks = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
        for word in words
    ]
    return {
        "run.init_from": str(root / "base"),
        "data.source": jsonl(root / "chat.jsonl", talks),
        "data.chat_template": str(root / "template.jinja"),
        "data.seq_tokens": "48",
        "data.batch_size": "4",
        "optimizer.learning_rate": "0.03",
        "optimizer.schedule": "{decay: constant}",
    }


def tuned(output: Path, chats: dict[str, str], **settings: str) -> Path:
    """The run of the example in a directory."""
    given = chats | {"output": str(output), "run.steps": "8", "checkpoint.every_steps": "4"} | settings
    main(["train", str(EXAMPLE), *(word for key, value in given.items() for word in (f"--{key}", value))])
    return output


def in_float(chats: dict[str, str], **lora: object) -> dict[str, object]:
    """The example without a quantized base, as a file."""
    mapping = yaml.safe_load(EXAMPLE.read_text())
    mapping["lora"]["rules"] |= lora
    return {name: section for name, section in mapping.items() if name != "quant"}


def on_text() -> dict:
    """The example on a small model and text, that starts from nothing."""
    data = {"name": "text", "source": "stdlib", "vocab_size": 280, "seq_tokens": 32, "batch_size": 4}
    return yaml.safe_load(EXAMPLE.read_text()) | {"model": SIZES, "data": data, "run": {"steps": 2}}


def config_of(mapping: dict, tmp_path: Path) -> RunConfig:
    return parse(RunConfig, load_yaml(Path(write(tmp_path / "config.yaml", mapping))))


def answers(run: Path) -> jax.Array:
    model, _ = read_model(run, run_config(run))
    tokens = jnp.arange(12).reshape(1, 12)
    return model.logits(model(tokens, tokens).hidden)


@pytest.fixture(scope="module")
def run(chats: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("runs") / "lora", chats)


@pytest.mark.slow
def test_the_example_learns_and_stores_its_adapters_alone(run, chats):
    found = losses(run)
    assert found[-1] < found[0] - 0.2
    (checkpoint,) = (run / "checkpoints").glob("*8")
    frozen = json.loads((checkpoint / "frozen.json").read_text())["model"]
    assert frozen["source"] == f"run:{chats['run.init_from']}" and len(frozen["sha256"]) == 64
    program = build_program(run_config(run))
    trained = named_leaves(program.step.model.variables.trained)
    kernels = {path.rsplit("/", 1)[0].removeprefix("lora/") for path in trained}
    assert all(path.startswith("lora/blocks/") for path in trained) and len(kernels) == 7
    assert not any(name.startswith("lora/") for name in frozen["leaves"])


@pytest.mark.slow
def test_adapters_on_quantized_activations_learn_as_on_quantized_weights(run, chats, tmp_path):
    nf4, w8a8 = losses(run), losses(tuned(tmp_path / "w8a8", chats, **{"quant.rules": "w8a8"}))
    assert w8a8[0] - w8a8[-1] > 0.7 * (nf4[0] - nf4[-1])


def test_the_frozen_base_takes_at_most_0_6_bytes_a_parameter(tmp_path):
    program = build_program(config_of(on_text(), tmp_path))
    frozen = jax.tree.leaves(program.abstract_state.frozen, is_leaf=is_quantized)
    nf4 = [leaf for leaf in frozen if is_quantized(leaf) and "nf4" in leaf.scheme]
    sizes = [sum(map(stored_bytes, jax.tree.leaves(leaf))) / np.prod(leaf.shape) for leaf in nf4]
    assert len(nf4) == 7 and max(sizes) <= 0.6


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_step_holds_at_most_one_layer_of_the_base_in_float(tmp_path, remat):
    config = config_of(on_text() | {"model": SIZES | {"remat": remat}}, tmp_path)
    program = traced_step(config, build_program(config)).lower().compile().as_text()
    for shape in ((EMBED, WIDTH), (WIDTH, EMBED), (EMBED, EMBED)):
        assert f"f32[{LAYERS},{shape[0]},{shape[1]}]" not in program


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_bitwise(run, chats, tmp_path):
    tuned(tmp_path / "cut", chats, **{"run.steps": "4"})
    given = chats | {"output": str(tmp_path / "cut"), "run.steps": "8", "checkpoint.every_steps": "4"}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    main(["train", str(EXAMPLE), *words, "--resume"])
    assert losses(tmp_path / "cut") == losses(run)


@pytest.mark.slow
def test_the_base_of_a_run_is_known_by_its_digests(chats, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(chats["run.init_from"], base)
    cut = tuned(tmp_path / "run", chats | {"run.init_from": str(base)}, **{"run.steps": "4"})
    (saved,) = (base / "checkpoints").iterdir()
    leaves = named_leaves(read_params(base, run_config(base).model)[0])
    shutil.rmtree(saved)
    with CheckpointStore(base / "checkpoints") as store:
        others = ((name, np.asarray(leaf) * (1.5 if name == "embedding" else 1)) for name, leaf in leaves.items())
        store.save_weights(others, (base / "config.yaml").read_text(), step=2)
    with pytest.raises(CheckpointError, match=r"digest \w+ when the run began, .* digest \w+ now"):
        read_model(cut, run_config(cut))


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False], ids=["nf4", "dora"])
def test_a_run_converts_with_its_adapters_merged(run, chats, tmp_path, quantized):
    source = run
    if not quantized:
        mapping = in_float(chats, magnitude=True)
        mapping |= {"output": str(tmp_path / "run")}
        words = [word for key, value in chats.items() for word in (f"--{key}", value)]
        main(["train", write(tmp_path / "run.yaml", mapping), *words, "--run.steps", "4"])
        source = tmp_path / "run"
    main(["convert", str(source), f"hf:{tmp_path / 'merged'}"])
    main(["convert", f"hf:{tmp_path / 'merged'}", str(tmp_path / "back")])
    main(["convert", str(source), f"run:{tmp_path / 'run-merged'}"])
    ours, merged = answers(source), answers(tmp_path / "back")
    np.testing.assert_allclose(ours, merged, atol=1e-5)
    np.testing.assert_allclose(ours, answers(tmp_path / "run-merged"), atol=1e-5)
    assert float(jnp.max(jnp.abs(ours - answers(Path(chats["run.init_from"]))))) > 0.01


def test_what_does_not_fit_is_refused(tmp_path, chats):
    mapping = on_text() | {"output": str(tmp_path / "never")}
    alone = {name: section for name, section in mapping.items() if name != "quant"}
    with pytest.raises(StackError, match=r"Section lora trains adapters .* random: run\.init_from is not set"):
        train(config_of(alone, tmp_path))
    mapping["run"] = {"steps": 2, "init_from": chats["run.init_from"]}
    swapped = {name: mapping[name] for name in mapping if name != "quant"} | {"quant": mapping["quant"]}
    nowhere = mapping | {"lora": {"rules": {"path": "mixer"}}}
    without = mapping | {"lora": {"rules": {"path": "blocks", "rank": 0}}}
    for config, message in (
        (swapped, "put quant before lora"),
        (nowhere, "path='mixer', matches no parameter"),
        (without, "nothing would be trained: all that match have rank 0"),
    ):
        with pytest.raises(StackError, match=message):
            train(config_of(config, tmp_path))
    assert not (tmp_path / "never").exists()
