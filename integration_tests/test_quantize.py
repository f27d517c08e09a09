"""A tiny run is trained, quantized, generated from, and trained on: stack-train and stack-quant meet in core alone."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from stack_core import ops
from stack_core.abi.config import parse
from stack_core.abi.metrics import combine_all
from stack_core.cli import main
from stack_core.ops.building import is_quantized
from stack_quant.model import quantize_model
from stack_quant.recipes import load_recipe
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.checkpoint.manifest import read_manifest
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.run.config import RunConfig, run_config
from stack_train.run.program import build_program
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_model, read_params

from .generation import Reference

# The default sessions compile without LLVM's optimizations, by which two programs differ in more last bits.
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
CONFIG = {
    "model": {
        "name": "llama",
        "vocab_size": 280,
        "layers": 1,
        "embed": 32,
        "heads": 2,
        "mlp": 64,
        "max_positions": 64,
        "dtype": "float32",
    },
    "data": {"seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.2},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "run": {"steps": 8},
}
W8A8 = [{"path": ".*", "weights": "int8", "activations": "int8"}]
W4 = [{"path": "embedding|lm_head", "weights": "int8"}, {"path": ".*", "weights": "int4", "tile_size": 16}]
W2 = [{"path": "embedding|lm_head", "weights": "int8"}, {"path": ".*", "weights": "int2"}]
MIXED = [
    {"path": "embedding", "weights": "fp8_e4m3"},
    {"path": "lm_head", "weights": "int2", "tile_size": 8},
    {"path": "query", "weights": "nf4", "tile_size": 16, "double_quantized": True},
    {"path": "key", "weights": "nvfp4"},
    {"path": "value", "weights": "mxfp4"},
    {"path": "output", "weights": "fp4", "tile_size": 16},
    {"path": "gate", "weights": "int3", "weight_calibration": "minmax"},
    {"path": "up", "weights": "mxfp8"},
    {"path": "down", "weights": "int5"},
]
INPUTS = ("tokens", "positions", "segment_ids")
TOKENS = jnp.arange(24).reshape(2, 12) * 11
POSITIONS = jnp.tile(jnp.arange(12), (2, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `run`, trained on the files of `texts`."""
    folder = tmp_path_factory.mktemp("quantize")
    texts = folder / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    for number in range(20):
        words = rng.choice(["alpha", "beta", "gamma", "return", "(x)", "\n"], 100)
        (texts / f"{number}.txt").write_text(" ".join(words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        main(["train", written(folder / "run.yaml", config(folder)), "--output", str(folder / "run")])
        yield folder


def config(folder, **sections):
    data = {**CONFIG["data"], "source": f"text:{folder / 'texts'}/*.txt"}
    return {**CONFIG, "data": data, **sections}


def written(path, mapping):
    path.write_text(yaml.safe_dump(mapping))
    return str(path)


def recipe(folder, rules):
    return written(folder / "recipe.yaml", {"rules": rules})


@pytest.fixture(scope="module")
def said(folder):
    """`said(rules)` is what `stack quantize --json` prints that quantizes by rules, with its `out` beside it."""
    made = {}

    def quantize(rules):
        key = json.dumps(rules)
        if key not in made:
            out = folder / f"quantized-{len(made)}"
            arguments = ["--recipe", recipe(folder, rules), "--out", str(out), "--json"]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                main(["quantize", str(folder / "run"), *arguments])
            made[key] = {**json.loads(printed.getvalue()), "out": out}
        return made[key]

    return quantize


@pytest.fixture(scope="module")
def quantized(said):
    """`quantized(rules)` is the run directory that `stack quantize` makes by rules."""
    return lambda rules: said(rules)["out"]


def model_of(run):
    return read_model(run, run_config(run))[0]


def logits_of(model, compiler_options=None):
    graph, state = nnx.split(model)

    @partial(jax.jit, compiler_options=compiler_options)
    def logits(state):
        merged = nnx.merge(graph, state)
        return merged.logits(merged(TOKENS, POSITIONS).hidden)

    return logits(state)


def in_float(model, quantized_model):
    """The float model, with the floats that the quantized parameters stand for."""
    params = jax.tree.map(
        lambda leaf: ops.dequantize(leaf, jnp.float32),
        nnx.to_pure_dict(nnx.state(quantized_model)),
        is_leaf=is_quantized,
    )
    return nnx.merge(nnx.graphdef(model), nnx.State(params))


def assert_equal_but_for_rounding(actual, expected):
    """Sums in other orders differ in their last bits, which takes an activation of some tokens to the next code."""
    difference = jnp.abs(actual - expected).max(-1)
    assert jnp.median(difference) < 1e-4 and difference.max() < 0.02, difference


@pytest.mark.parametrize("rules", [pytest.param(W4, id="w4", marks=pytest.mark.slow), pytest.param(MIXED, id="mixed")])
def test_a_loaded_model_has_the_logits_of_its_fake_quantized_reference(folder, quantized, rules):
    loaded = model_of(quantized(rules))
    original = model_of(folder / "run")
    expected = logits_of(in_float(original, loaded))
    np.testing.assert_allclose(logits_of(loaded), expected, atol=1e-4)
    assert jnp.abs(expected - logits_of(original)).max() > 1e-3, "the reference is none if nothing is rounded"


def test_activations_are_rounded_in_a_loaded_model_as_in_one_that_was_never_saved(folder, quantized):
    original = model_of(folder / "run")
    sample = {"tokens": TOKENS, "positions": POSITIONS}
    rules = load_recipe(recipe(folder, W8A8))
    models = (quantize_model(original, rules, sample, method=method) for method in ("ptq", "qat"))
    expected, reference = (logits_of(model, AS_USERS_COMPILE) for model in models)
    np.testing.assert_array_equal(logits_of(model_of(quantized(W8A8)), AS_USERS_COMPILE), expected)
    assert_equal_but_for_rounding(expected, reference)


def test_codes_are_stored_in_their_own_bits(folder, quantized):
    with CheckpointStore(quantized(MIXED) / "checkpoints") as store:
        manifest = read_manifest(store.path(store.latest()))
    specs = {name.removeprefix("params/"): str(record.spec) for name, record in manifest.leaves.items()}
    assert specs["embedding/planes/0"] == "float8_e4m3fn[280, 32]"
    assert specs["lm_head/planes/0"] == "int2[32, 280]" and specs["lm_head/scale"] == "float32[4, 280]"
    assert specs["blocks/0/0/attention/value/kernel/scale"] == "float8_e8m0fnu[1, 1, 32]"
    assert specs["norm"] == "float32[32]"


def test_the_command_prints_the_report_and_both_losses(folder, said, capsys):
    result = said(W8A8)
    assert result["bytes_after"] < 0.3 * result["bytes_before"] and result["targets"] > 100
    assert 0 < abs(result["loss_after"] / result["loss_before"] - 1) < 0.01
    assert {row["kind"] for row in result["rows"]} == {"rule", "parameter", "operation"}
    arguments = ["--recipe", recipe(folder, W8A8), "--out", str(folder / "as-text"), "--evaluation-batches=1"]
    main(["quantize", str(folder / "run"), *arguments])
    printed = capsys.readouterr()
    assert printed.err.split("\n")[-7:] == [
        "reading the model",
        "reading the data",
        "quantizing",
        "loss before",
        "loss after",
        "writing",
        "",
    ]
    lines = printed.out.splitlines()
    assert any("no product and no lookup uses it" in line for line in lines)
    assert re.fullmatch(r"loss on held-out data: .* before, .* after \([+-].*%\), over .* targets", lines[-2])


def test_the_loss_after_is_that_of_the_model_that_is_written(folder, said):
    result = said(W4)
    trained = RUN_FORMAT.open_model(folder / "run")
    reference = in_float(trained.model, model_of(result["out"]))
    batches = [jax.tree.map(jnp.asarray, batch) for batch in trained.validation_batches()]
    loss = combine_all([trained.metrics(reference, batch) for batch in batches])["loss"]
    assert result["loss_after"] == pytest.approx(float(loss), rel=1e-5) != result["loss_before"]
    assert result["targets"] == loss.weight


def test_a_quantized_model_generates(quantized, capsys):
    run = quantized(W4)
    capsys.readouterr()
    main(["generate", str(run), "--prompt", "alpha beta", "--max-tokens", "4", "--temperature", "0", "--json"])
    result = json.loads(capsys.readouterr().out)
    prompt = HuggingFaceTokenizer.load(run / "tokenizer").encode("alpha beta")
    assert len(result["tokens"]) == 4
    Reference(RUN_FORMAT.open_for_generation(run)).assert_most_likely(prompt, result["tokens"])


def test_training_starts_from_what_quantized_parameters_stand_for(folder, quantized):
    start = config(folder, run={"steps": 1, "init_from": str(quantized(W4))}, output=str(folder / "from-quantized"))
    with pytest.warns(UserWarning, match=r"is transformed by section quant .* starts from the floats"):
        main(["train", written(folder / "start.yaml", start)])
    loaded = model_of(quantized(W4))
    params = read_params(quantized(W4), loaded.config)[0]
    np.testing.assert_array_equal(params["lm_head"], ops.dequantize(loaded.lm_head.get_value(), jnp.float32))


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_quantized_training_follows_training_in_float(folder):
    rules = [{**W8A8[0], "gradients": "int8"}]
    run = config(folder, output=str(folder / "in-int8"), quant={"method": "qt", "rules": rules})
    main(["train", written(folder / "in-int8.yaml", run)])
    expected, losses = losses_of(folder / "run"), losses_of(folder / "in-int8")
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses[0] != expected[0]


def test_a_recipe_that_is_trained_by_is_what_the_run_is_quantized_by(folder, capsys):
    run = config(folder, output=str(folder / "aware"), quant={"method": "qat", "rules": "w4"})
    run["run"] = {"steps": 2, "init_from": str(folder / "run")}
    main(["train", written(folder / "aware.yaml", run)])
    resolved = yaml.safe_load((folder / "aware" / "config.yaml").read_text())["quant"]
    assert resolved["method"] == "qat" and all(isinstance(rule, dict) for rule in resolved["rules"])
    assert {rule["weights"] for rule in resolved["rules"]} >= {"int4"}
    capsys.readouterr()
    main(["quantize", str(folder / "aware"), "--json"])
    assert json.loads(capsys.readouterr().out)["loss_after"] > 0
    expected, loaded = model_of(folder / "aware"), model_of(folder / "aware-quantized")
    np.testing.assert_allclose(logits_of(loaded), logits_of(expected), rtol=0, atol=1e-4)


def test_distillation_moves_a_quantized_model_towards_its_float_teacher(tmp_path):
    teacher = {**CONFIG, "output": str(tmp_path), "model": {**CONFIG["model"], "initializer_std": 0.3}}
    written(tmp_path / "config.yaml", teacher)
    student = {
        **teacher,
        "quant": {"method": "qat", "rules": W2},
        "objective": {"name": "logit_distill", "teacher": f"run:{tmp_path}"},
        "run": {"steps": 40},
    }
    in_float, program = (build_program(parse(RunConfig, mapping)) for mapping in (teacher, student))
    params = jax.tree.map(np.asarray, in_float.init(key=jax.random.key(0)).params)
    batch = {"tokens": TOKENS, "targets": TOKENS, "positions": POSITIONS, "segment_ids": jnp.ones_like(TOKENS)}

    model = in_float.step.model.merge(params)
    rounded = quantize_model(model, load_recipe(recipe(tmp_path, W2)), batch)
    expected, actual = (jax.nn.log_softmax(logits_of(each)) for each in (model, rounded))
    divergence = jnp.mean(jnp.sum(jnp.exp(expected) * (expected - actual), axis=-1))

    state = program.init(params, key=jax.random.key(0), auxiliary={"teacher": jax.tree.map(jnp.asarray, params)})
    step, losses = program.compile(batch), []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"].value))
    # The student is rounded and the teacher is not: the loss begins at the divergence of the two.
    assert losses[0] == pytest.approx(float(divergence), rel=1e-3) and losses[0] > 0.1
    assert np.mean(losses[-5:]) < 0.25 * losses[0]


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "quantize"])
def test_another_recipe_than_the_models_says_what_differs(folder, capsys, command):
    run = {"model": CONFIG["model"], "output": "", "quant": {"method": "qat", "rules": W8A8}}
    trained = folder / f"trained-by-w8a8-{command}"
    trained.mkdir()
    written(trained / "config.yaml", run)
    other = [{**W8A8[0], "weights": "int4"}]
    if command == "train":
        start = config(folder, output=str(folder / "never"), quant={"method": "qat", "rules": other})
        path = written(folder / "other.yaml", {**start, "run": {"init_from": str(trained)}})
        message = refusal(capsys, "train", path)
    else:
        with CheckpointStore(trained / "checkpoints") as store:
            leaves = read_params(folder / "run", run_config(trained).model)[0]
            store.save_weights(named_leaves(leaves).items(), "")
        arguments = ("--recipe", recipe(folder, other), "--out", folder / "never")
        message = refusal(capsys, "quantize", trained, *arguments)
    assert "by another recipe" in message and "rules.0.weights: 'int4', not 'int8'" in message
    assert "activations" not in message
    assert not (folder / "never").exists()


@pytest.mark.parametrize(("field", "value"), [("weights", "int4"), ("activations", None)])
def test_a_checkpoint_says_in_what_the_rules_differ_that_it_was_quantized_by(folder, quantized, capsys, field, value):
    run = folder / f"other-{field}"
    shutil.copytree(quantized(W8A8), run)
    run_yaml = yaml.safe_load((run / "config.yaml").read_text())
    run_yaml["quant"]["rules"][0][field] = value
    written(run / "config.yaml", run_yaml)
    message = refusal(capsys, "generate", run, "--prompt", "alpha")
    assert f"quant.rules.0.{field}: {value!r}, not 'int8'\n" in message and message.count("quant.rules") == 1


def test_a_run_whose_recipe_leaves_codes_is_not_trained(folder, capsys):
    run = config(folder, output=str(folder / "never"), quant={"rules": W8A8})
    assert "no optimizer can update" in refusal(capsys, "train", written(folder / "codes.yaml", run))


def test_a_quantized_run_is_not_quantized_again(folder, quantized, capsys):
    run = quantized(W4)
    message = refusal(capsys, "quantize", run, "--recipe", recipe(folder, W8A8), "--out", folder / "never")
    assert "are quantized already, by section quant" in message


def test_weights_that_are_not_finite_are_named(folder, capsys):
    source = folder / "run"
    broken = folder / "broken"
    shutil.copytree(source, broken, ignore=shutil.ignore_patterns("checkpoints"))
    params = read_params(source, run_config(source).model)[0]
    params["lm_head"] = params["lm_head"].at[3, 4].set(jnp.nan)
    params["blocks"][0][0]["feed_forward"]["up"]["kernel"] = params["blocks"][0][0]["feed_forward"]["up"]["kernel"] / 0
    with CheckpointStore(broken / "checkpoints") as store:
        store.save_weights(named_leaves(params).items(), "")
    message = refusal(capsys, "quantize", broken, "--recipe", recipe(folder, W8A8), "--out", folder / "never")
    assert re.findall(r"(\S+): (\d+) of (\d+)", message) == [
        ("blocks/0/0/feed_forward/up/kernel", "2048", "2048"),
        ("lm_head", "1", "8960"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("{run}", "--recipe", "{folder}/long.yaml"),
            "a tile of 128 entries is longer than all its contracted axes, shape [1, 32, 32]",
        ),
        (("{run}", "--recipe", "w4b8"), "Unknown recipe 'w4b8'. Did you mean 'w4a8'"),
        (("{run}", "--recipe", "none.yaml"), "Cannot read config 'none.yaml'"),
        (("{run}",), "was not trained by a recipe"),
        (("{run}s", "--recipe", "w8a8"), "is not a directory"),
        (("{folder}/texts", "--recipe", "w8a8"), "holds no model of a known format"),
        (("hg:{run}", "--recipe", "w8a8"), "Unknown model format 'hg'"),
        (("{run}", "--recipe", "w8a8", "--data", "txt:none"), "Unknown name 'txt' among data_sources"),
    ],
)
def test_what_cannot_be_quantized_is_refused(folder, capsys, arguments, message):
    long = [{"path": "query", "weights": "int4", "tile_size": 128}, {"path": ".*", "weights": "int8"}]
    written(folder / "long.yaml", {"rules": long})
    given = [argument.format(run=folder / "run", folder=folder) for argument in arguments]
    assert message in refusal(capsys, "quantize", *given, "--out", folder / "never")
    assert not (folder / "never").exists()


def test_nothing_is_overwritten(folder, capsys):
    arguments = ("quantize", folder / "run", "--recipe", "w8a8", "--out", folder / "texts")
    assert "exists already" in refusal(capsys, *arguments)


def test_a_hugging_face_checkpoint_is_quantized(folder, capsys):
    checkpoint, out = folder / "checkpoint", folder / "from-huggingface"
    main(["convert", str(folder / "run"), f"hf:{checkpoint}"])
    message = refusal(capsys, "quantize", checkpoint, "--recipe", "w8a8", "--out", out)
    assert "does not name the training data of its model" in message and "text" in message
    data = f"text:{folder / 'texts'}/*.txt"
    main(["quantize", str(checkpoint), "--recipe", "w8a8", "--data", data, "--out", str(out), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["loss_after"] == pytest.approx(result["loss_before"], rel=0.01)
    assert (out / "huggingface" / "config.json").is_file()
    main(["generate", str(out), "--prompt", "alpha", "--max-tokens", "2"])


STATIC = [
    {"path": "lm_head", "weights": "int8", "activations": "int8", "activation_calibration": "moving,0.9"},
    {"path": ".*", "weights": "int8", "activations": "int8", "static_ranges": True},
    {"op": "attention", "activations": "fp8_e4m3", "static_ranges": True},
]


def test_static_ranges_are_measured_on_the_runs_data_and_kept_with_the_model(folder, quantized, capsys):
    run = quantized(STATIC)
    model, original = model_of(run), RUN_FORMAT.open_model(folder / "run")
    ranges = {site: span["high"] for site, span in nnx.to_pure_dict(nnx.state(model))["static_ranges"].items()}
    assert ranges["lm_head"].shape == (1,) and ranges["blocks/0/0/feed_forward/down/kernel"].shape == (1, 1)
    assert sum(name.endswith(("/query", "/key", "/value")) for name in ranges) == 3
    batches = [jax.tree.map(jnp.asarray, dict(batch)) for batch in islice(original.training_batches(), 16)]
    hidden = jax.jit(lambda batch: original.model(*(batch[name] for name in INPUTS)).hidden)
    weights = [0.9 ** (15 - place) for place in range(16)]
    largest = np.average([float(jnp.abs(hidden(batch)).max()) for batch in batches], weights=weights)
    assert float(ranges["lm_head"][0]) == pytest.approx(largest, rel=1e-4)
    sample = {"tokens": TOKENS, "positions": POSITIONS}
    stream = original.training_batches()
    expected = quantize_model(original.model, load_recipe(recipe(folder, STATIC)), sample, stream=stream)
    np.testing.assert_array_equal(logits_of(model, AS_USERS_COMPILE), logits_of(expected, AS_USERS_COMPILE))
    capsys.readouterr()
    main(["generate", str(run), "--prompt", "alpha beta", "--max-tokens", "3", "--temperature", "0", "--json"])
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    params = read_params(run, model.config)[0]
    assert "static_ranges" not in params
    np.testing.assert_array_equal(params["lm_head"], ops.dequantize(model.lm_head.get_value(), jnp.float32))


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param([{"path": ".*", "weights": "int8"}], id="int8 by channel", marks=pytest.mark.slow),
        pytest.param(W4, id="int8 by channel and int4 in tiles"),
    ],
)
def test_a_quantized_run_comes_to_its_places_on_eight_devices(quantized, rules):
    script = Path(__file__).with_name("quantized_run_on_eight_devices.py")
    arguments = [sys.executable, str(script), str(quantized(rules))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
