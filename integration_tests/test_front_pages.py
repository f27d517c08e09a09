"""The front page of each package: its public names, its version, and an example that runs."""

import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import io
import re
import textwrap
import typing
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import stack_quant
import stack_rl
import stack_train
from stack_core.abi.errors import ConfigError, ConversionError, UnknownName
from stack_quant.errors import QuantError
from stack_train.checkpoint import CheckpointConfig

NAMES = {
    "stack_core": "StackError hookimpl lazy_exports open_for_generation open_model ops registries",
    "stack_kernels": "expected implementation tune tuned untyped",
    "stack_profile": """AnomalyConfig Capture CaptureError CaptureWarning Continuous ContinuousConfig Listener
        ProfileError Trace TraceError Watch capture listen load_trace""",
    "stack_quant": """ArraySpec Budget QArray QType QuantizedCheckpoint Range Report Rule dequantize fake_quantize
        load_recipe qtype quantize quantize_array quantize_function quantize_model report""",
    "stack_rl": """Action AdamParams CISPOConfig Completion DAPOConfig DPOConfig Datum DistillConfig DrGRPOConfig
        Environment EnvironmentKind GRPOConfig GSPOConfig IPOConfig KTOConfig LocalClient ORPOConfig Observation
        PPOConfig PromptsConfig RLOOConfig ReinforceConfig Reward RewardModelConfig RolloutData Score SimPOConfig
        StepResult Tasks ToolsConfig train""",
    "stack_serve": "Completion LLM Output Piece SamplingParams",
    "stack_train": """CausalLMConfig CheckpointStore ImageTextModel LoadedModel Program Run RunConfig RunSettings
        RunSummary SamplingConfig Step TextGenerator Trainer build convert load load_image_text make_step start
        train""",
}
PACKAGES = tuple(NAMES)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A directory with texts, in which the examples run."""
    folder = tmp_path_factory.mktemp("front")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"{number} one two buckle my shoe, three four knock at the door\n" * 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names(name):
    package = importlib.import_module(name)
    assert package.__all__ == sorted(NAMES[name].split())
    assert sorted(dir(package)) == sorted([*package.__all__, "__version__"])
    assert package.__version__ == importlib.metadata.version(name.replace("_", "-"))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_read_the_same_names(name):
    """The names come from the modules of the block that only type checkers read."""
    package = importlib.import_module(name)
    (block,) = [node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If)]
    read = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(read) == package.__all__
    for public, module in read.items():
        found = getattr(importlib.import_module(module), public)
        assert getattr(package, public) is found or typing.get_origin(found)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_has_a_docstring(name):
    package = importlib.import_module(name)
    objects = {public: getattr(package, public) for public in package.__all__}
    documented = [public for public, found in objects.items() if inspect.getdoc(found)]
    assert documented == package.__all__


def run_example(name):
    """What the example on a package's front page prints."""
    block = textwrap.dedent(importlib.import_module(name).__doc__.partition("::\n\n")[2])
    assert 8 <= len(block.strip().splitlines()) <= 14
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, f"the example of {name}", "exec"), {"__name__": "an_example"})
    return out.getvalue().strip()


@pytest.fixture(scope="module")
def trained(folder):
    """What the example of stack-train prints, which leaves the run `runs/small` and the directory `exported`."""
    return run_example("stack_train")


@pytest.mark.parametrize("name", ["stack_core", "stack_kernels", "stack_profile"])
def test_the_example_runs(name):
    assert run_example(name)


@pytest.mark.slow  # the READMEs of these packages have similar examples
@pytest.mark.parametrize("name", ["stack_quant", "stack_serve", "stack_rl"])
def test_the_example_runs_on_a_trained_model(name, trained):
    assert trained and run_example(name)


def test_a_config_is_a_file_a_mapping_or_an_object_with_changes(folder):
    base = {"output": "runs/base", "model": SMALL, "data": {"name": "text", "source": "text:*.txt", "seq_tokens": 16}}
    (folder / "base.yaml").write_text(str(base))
    from_file = stack_train.train("base.yaml", run={"steps": 2}, optimizer={"learning_rate": 1e-2})
    assert from_file.step == 2
    assert "learning_rate: 0.01" in (folder / "runs/base/config.yaml").read_text()
    assert "iframe" in from_file._repr_html_()
    assert re.fullmatch(
        r"<run runs/base: step 2, loss [\d.]+, validation loss [\d.]+, [\d,]+ tokens/s>", repr(from_file)
    )
    config = stack_train.RunConfig(**{**base, "output": "runs/other", "run": {"steps": 1}})
    run = stack_train.build(dataclasses.replace(config, output="runs/third"))
    assert repr(run) == f"<Run runs/third, new: {run.program.step.model.parameter_count:,} parameters, 1 steps>"
    assert stack_train.train(config, optimizer={"name": "sgd", "learning_rate": 0.1}).step == 1
    with pytest.raises(ConfigError, match=r"Unknown key 'run\.stepz'"):
        stack_train.train(base, run={"stepz": 3})
    with pytest.raises(UnknownName, match="Unknown name 'modell'"):
        stack_train.train(base, modell={})


def test_a_loaded_model_shows_itself_and_is_exported(folder, trained):
    model = stack_train.load("hf:exported")
    assert repr(model).startswith("<model hf:exported: 2") and "300 tokens in the vocabulary" in repr(model)
    made = model.save_pretrained("again")
    assert (made.destination, made.parameters) == (Path("again"), model.parameter_count)
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("exported", "again")]
    assert weights[0] == weights[1]
    assert sorted(path.name for path in folder.glob(".convert-*")) == []
    with pytest.raises(ConfigError, match="Unknown key 'max_token'"):
        model.generate("one", max_token=2)
    with pytest.raises(ConversionError, match=r"'bases' is not an option of a conversion\. Did you mean 'base'"):
        stack_train.convert("runs/small", "hf:x", bases="y")


def test_quantize_takes_rules_and_refuses_a_model(folder, trained):
    rules = [{"path": ".*", "weights": "int8", "optional": True}]
    with pytest.raises(QuantError, match="Set out to a new directory"):
        stack_quant.quantize("runs/small", rules)
    with pytest.raises(QuantError, match=r"no option 'algoritm'\. Did you mean 'algorithm'"):
        stack_quant.quantize("runs/small", "w8a8", algoritm="gptq")
    with pytest.raises(QuantError, match="Use quantize_model for a model"):
        stack_quant.quantize(np.ones(3), "w8a8")  # pyrefly: ignore
    assert stack_quant.quantize("runs/small", "w8a8", evaluation_batches=0).destination.name == "small-w8a8"
    assert (folder / "runs/small-w8a8/config.yaml").is_file()


def test_reinforcement_learning_takes_names_settings_and_configs(folder, trained):
    (folder / "prompts.jsonl").write_text('{"prompt": "one two"}')
    with pytest.raises(ConfigError, match=r"'cell' computes its own rewards"):
        stack_rl.train("runs/small", "cell", "exact", output="runs/none")
    with pytest.raises(ConfigError, match="env is a int"):
        stack_rl.train("runs/small", 3, output="runs/none")
    with pytest.raises(ConfigError, match="lacks the key name"):
        stack_rl.train("runs/small", {"source": "prompts.jsonl"}, "exact", output="runs/none")
    for setting in ({"objective": "ppo"}, {"data": {"environment": "cell"}}, {"run": {"init_from": "runs/other"}}):
        with pytest.raises(ConfigError, match="set the same key"):
            stack_rl.train("runs/small", "prompts.jsonl", "exact", output="runs/none", **setting)
    with pytest.raises(UnknownName, match="grpoo"):
        stack_rl.train("runs/small", "prompts.jsonl", "exact", "grpoo", output="runs/none")
    environment = stack_rl.PromptsConfig(source="prompts.jsonl", rewards=("characters",), max_tokens=4)
    sizes = {"groups": 1, "group_size": 2, "seq_tokens": 16}
    settings = {"output": "runs/rloo", "data": sizes, "run": {"steps": 1}}
    assert stack_rl.train("runs/small", environment, lambda _: 1.0, "rloo", **settings).step == 1


class Line(nnx.Module):  # noqa: D101
    def __init__(self, key):
        self.last = nnx.Linear(2, 1, rngs=nnx.Rngs(key))

    def __call__(self, x):
        return self.last(x)[:, 0]


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(16, 2)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, -2])}


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


SMALL = {"name": "llama", "vocab_size": 300, "layers": 1, "embed": 32, "heads": 2, "mlp": 64}


def test_a_trainer_of_a_module_resumes_and_shows_its_curve(tmp_path, capsys):
    def trainer(data=batch_of):
        return stack_train.Trainer(Line, data, loss=loss, optimizer=optax.adam(0.1), steps=60, output=tmp_path / "line")

    first = trainer()
    assert [each["step"] for each in first.train(30, log_every_steps=15)] == list(range(1, 31))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["15", "30"]
    resumed, whole = trainer(), stack_train.Trainer(Line, batch_of, loss=loss, optimizer=optax.adam(0.1), steps=60)
    assert [each["step"] for each in resumed.train()] == list(range(31, 61))
    assert resumed.train() == []
    assert resumed.history == whole.train()[30:]
    assert repr(resumed).startswith("<Trainer of 3 parameters at step 60 of 60, grad_norm ")
    assert "svg" in resumed._repr_html_()
    x = batch_of(99)["x"]
    np.testing.assert_array_equal(resumed.model(x), whole.model(x))
    assert abs(np.asarray(resumed.model(x)) - batch_of(99)["y"]).max() < 0.5
    for data in ([batch_of(0), batch_of(1)], batch_of(0)):
        assert len(stack_train.Trainer(Line, data, loss=loss, optimizer=optax.sgd(0.1), steps=2).train()) == 2
    for options, message in (
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2, "checkpoint": CheckpointConfig(keep=1)}, "checkpoint has no effect without output"),
    ):
        with pytest.raises(ConfigError, match=message):
            stack_train.Trainer(Line, batch_of, loss=loss, optimizer=optax.sgd(0.1), **options)
    with pytest.raises(ConfigError, match="An iterator cannot resume: make it a list"):
        trainer(iter([batch_of(0)]))
