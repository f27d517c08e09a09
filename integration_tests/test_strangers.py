"""What third parties bring works when it is installed, and vanishes when it is removed."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

import stack_profile
from stack_core import ops
from stack_core.abi.ops import QView

from .served import Served, write_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
TRAINING = """
model: {{name: llama, vocab_size: 280, layers: 1, embed: 16, heads: 2, mlp: 24, max_positions: 16, dtype: float32}}
data: {{source: "text:{text}", seq_tokens: 16, batch_size: 2, validation_fraction: 0}}
run: {{steps: 3}}
output: {output}
"""


TRAINING_PLUGINS = ("model", "objective", "optimizer", "data_source", "data_kind", "observer")


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()))
def test_an_example_is_a_distribution_of_fewer_than_130_lines_that_the_readme_names(name):
    files = [path for path in (EXAMPLES / name).rglob("*") if path.suffix in (".py", ".toml")]
    assert {"pyproject.toml", "plugin.py"} <= {path.name for path in files}
    assert sum(len(path.read_text().splitlines()) for path in files) < 130
    assert f"pip install ./examples/plugins/{name} " in (EXAMPLES / "README.md").read_text()


CALL = """
import jax, jax.numpy as jnp
from stack_core import ops
from stack_core.abi.plugins import plugins
x, w_gate, w_up = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 8), (8, 5), (8, 5)]))
expected = ops.gated_linear_unit(x, w_gate, w_up, implementation="reference")
actual = ops.gated_linear_unit(x, w_gate, w_up, implementation="one_product")
assert jnp.allclose(actual, expected, rtol=1e-5), (actual, expected)
products = str(jax.make_jaxpr(lambda *a: ops.gated_linear_unit(*a, implementation="one_product"))(x, w_gate, w_up))
assert products.count("dot_general[") == 1
(registered,) = (each.registered for each in plugins.reports() if each.distribution == "acme-glu")
assert registered == {"ops": ("gated_linear_unit/one_product",)}, registered
"""


def test_an_op_implementation_is_chosen_by_name_and_meets_the_contract(environment):
    with environment.installed(EXAMPLES / "op"):
        passed = environment.check_contract(EXAMPLES / "op", "-k", "float32 or shard_map", code=CALL)
    assert re.search(r"^\d+ passed, \d+ skipped", passed, re.MULTILINE), passed


CONV = """
import jax, jax.numpy as jnp
from acme_conv.op import short_conv
from stack_core import ops
from stack_core.abi.plugins import plugins, registries
from stack_kernels import expected, implementation
x, weight = jnp.arange(30.0).reshape(2, 5, 3), jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
assert jnp.array_equal(short_conv(x, weight), x * weight[0] + before * weight[1])
gradient = jax.grad(lambda x: short_conv(x, weight).sum())
by_example = jax.vmap(jax.grad(lambda x: short_conv(x, weight, implementation="reference").sum()))
assert jnp.array_equal(gradient(x), by_example(x))
(call,) = ops.explain(gradient, x)
assert call.call.op == "short_conv"
assert {each.implementation.name for each in (call.forward, call.backward)} == {"grouped"}
mine = implementation("short_conv", name="mine", is_opaque=False)(lambda x, weight: x)
assert jnp.array_equal(short_conv(x, weight, implementation=mine), x)
rows = expected("short_conv", {"x": (2, 5, 3), "weight": (2, 3)}, "h100")
assert {row.implementation for row in rows} == {"grouped", "reference"}
assert "short_conv" in registries.op_definitions
(registered,) = (each.registered for each in plugins.reports() if each.distribution == "acme-conv")
assert registered == {"op_definitions": ("short_conv",), "ops": ("short_conv/grouped", "short_conv/reference")}
"""


def test_an_op_of_a_stranger_is_dispatched_differentiated_and_held_to_its_own_contract(environment):
    with environment.installed(EXAMPLES / "op_definition"):
        passed = environment.check_contract(EXAMPLES / "op_definition", "-k", "float32 or shard_map", code=CONV)
    assert re.search(r"^20 passed, \d+ deselected", passed, re.MULTILINE), passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernel", "op", "op_definition"])
def test_an_example_meets_its_whole_contract(environment, name):
    with environment.installed(EXAMPLES / name):
        passed = environment.check_contract(EXAMPLES / name)
    assert re.search(r"^\d+ passed", passed, re.MULTILINE), passed


def test_a_command_runs_and_is_gone_once_it_is_removed(environment, tmp_path):
    records = [{"kind": "train", "step": step, "loss": 8.0 - step} for step in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    commands = (["--help"], ["losses", str(tmp_path)], ["losses", str(tmp_path / "nowhere")])
    with environment.installed(EXAMPLES / "command"):
        help_, drawn, refused = environment.stack_each(*commands, PYTHONUTF8="1")
    assert "Draw the losses of a run." in help_.stdout
    assert drawn.stdout == "█▇▆▅▄▃▂▁ 8.000 to 1.000\n"
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "does not exist. Name the output directory" in refused.stderr
    removed = environment.stack("losses", str(tmp_path), check=False)
    assert removed.returncode == 2
    assert "Unknown name 'losses' among commands" in removed.stderr


STRANGE = """
model: {{name: bigram, vocab_size: {vocab_size}}}
data: {data}
objective: {{name: smoothed, smoothing: 0.2}}
optimizer: {{name: signs, schedule: {{warmup_steps: 0}}}}
run: {{steps: {steps}}}
output: {output}
"""


def _losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def test_a_run_of_a_strangers_model_objective_optimizer_data_and_observer(environment, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("title,body\n" + "".join(f"number {i},the body of {i} and what it says\n" for i in range(50)))
    text = f'{{source: "csv:{table}#body", seq_tokens: 16, batch_size: 2, validation_fraction: 0}}'
    kinds = {"text": (280, text), "bytes": (256, f"{{name: bytes, path: {table}}}")}
    names = {kind: tmp_path / f"{kind}.yaml" for kind in kinds}
    for kind, (vocab_size, data) in kinds.items():
        config = STRANGE.format(vocab_size=vocab_size, data=data, steps=3, output=tmp_path / kind)
        names[kind].write_text(config)
    trained = [["train", str(names[kind])] for kind in kinds]
    wrong = ["train", str(names["text"]), "--data.source=csv:nowhere.csv", f"--output={tmp_path}/wrong"]
    with environment.installed(*(EXAMPLES / name for name in TRAINING_PLUGINS)):
        *done, refused = environment.stack_each(*trained, wrong, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert [each.returncode for each in done] == [0, 0], done
    for kind, (vocab_size, _) in kinds.items():
        losses = _losses(tmp_path / kind)
        assert list(losses) == [1, 2, 3]
        assert losses[1] == pytest.approx(np.log(vocab_size), rel=0.2)
    assert "There is no file nowhere.csv. Write csv:FILE#COLUMN." in refused.stderr
    journal = (tmp_path / "text" / "journal.txt").read_text()
    events = re.findall(r"^[\d-]+ [\d:]+ (\w+)\(", journal, re.MULTILINE)
    assert (events[0], events[-1]) == ("RunStarted", "RunFinished")
    assert re.findall(r"StepFinished\(step=(\d+)", journal) == ["1", "2", "3"]
    assert "CheckpointSaved(step=3" in journal


# What `stack train`, `stack generate` and the engine of `stack serve` do with a run.
GENERATED = """
import json, sys
from stack_core.cli import main
from stack_serve import LLM, SamplingParams
config, run = sys.argv[1:]
main(["train", config])
main(["generate", run, "--prompt", "import", "--max-tokens", "9", "--temperature", "0", "--json"])
with LLM(run, max_sequences=1) as llm:
    (output,) = llm.generate("import", SamplingParams(max_tokens=9, temperature=0.0))
print(json.dumps({"text": output.text}))
"""


def test_a_model_with_attention_and_a_cache_trains_generates_and_is_served(environment, tmp_path):
    run = tmp_path / "run"
    config = TRAINING.format(text=__file__, output=run)
    config = re.sub(r"model: .*", "model: {name: decoder, vocab_size: 280, max_positions: 64}", config)
    (tmp_path / "run.yaml").write_text(config)
    with environment.installed(EXAMPLES / "decoder"):
        done = environment.run("-c", GENERATED, str(tmp_path / "run.yaml"), str(run), XDG_CACHE_HOME=str(tmp_path))
    generated, served = (json.loads(line)["text"] for line in done.stdout.splitlines()[-2:])
    assert served == generated != ""


SERVED = """
import sys
from stack_serve import LLM, SamplingParams
with LLM(sys.argv[1], max_sequences=1) as llm:
    print(llm.generate("abc", SamplingParams(max_tokens=8, temperature=0.0))[0].text)
"""


def test_a_directory_of_a_strangers_format_is_served(environment, tmp_path):
    table = np.full((256, 256), -9.0, np.float32)
    for before, after in zip(b"abcdef", b"bcdefa", strict=True):
        table[before, after] = 9.0
    np.save(tmp_path / "table.npy", table)
    with environment.installed(EXAMPLES / "model_format"):
        assert environment.run("-c", SERVED, str(tmp_path)).stdout == "defabcde\n"


# An error of an episode ends the run, by the default of `data.on_failure`.
GUESSING = """
data: {{name: rollouts, environment: {{name: guess, held_out: 4}}, groups: 2, group_size: 2, seq_tokens: 128}}
objective: {{name: grpo, kl: 0.0}}
run: {{steps: 1, init_from: {base}}}
output: {output}
"""


def test_an_environment_of_a_stranger_is_played(environment, tmp_path):
    base = TRAINING.format(text=__file__, output=tmp_path / "base").replace("max_positions: 16", "max_positions: 128")
    (tmp_path / "base.yaml").write_text(base.replace("steps: 3", "steps: 1"))
    (tmp_path / "guess.yaml").write_text(GUESSING.format(base=tmp_path / "base", output=tmp_path / "guess"))
    train = (["train", str(tmp_path / f"{name}.yaml")] for name in ("base", "guess"))
    wrong = ["train", str(tmp_path / "guess.yaml"), "--data.environment.largest", "1", "--output", str(tmp_path / "w")]
    with environment.installed(EXAMPLES / "environment"):
        *done, refused = environment.stack_each(*train, wrong, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert [each.returncode for each in done] == [0, 0], done
    assert list(_losses(tmp_path / "guess")) == [1]
    assert "data.environment.largest" in refused.stderr


def test_an_engine_is_served_as_ours_is(environment, tmp_path):
    write_checkpoint(tmp_path)
    with environment.installed(EXAMPLES / "engine"):
        served = Served(tmp_path, "--engine", "lookup", python=str(environment.python))
        answer = served.openai.completions.create(model=served.model, prompt="abcab", max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="Nothing is sampled, so omit top_p"):
            served.openai.completions.create(model=served.model, prompt="abcab", top_p=0.5)
        served.stop()
    assert answer.usage.completion_tokens == 9
    assert answer.choices[0].text in "cab" * 9


def test_a_logits_processor_is_served_to_the_requests_that_select_it(environment, tmp_path):
    write_checkpoint(tmp_path)
    example = EXAMPLES / "logits_processor"
    files = [path for path in example.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 60
    with environment.installed(example):
        served = Served(tmp_path, "--logits-processors", "top_sigma", python=str(environment.python))

        def complete(**xargs):
            options = {"prompt": "abc", "max_tokens": 8, "temperature": 1.5, "seed": 5}
            answer = served.openai.completions.create(model=served.model, n=2, **options, extra_body=xargs)
            return [choice.text for choice in answer.choices]

        def greedy():
            answer = served.openai.completions.create(model=served.model, prompt="abc", max_tokens=8, temperature=0)
            return [answer.choices[0].text] * 2

        free, wide = complete(), complete(vllm_xargs={"top_sigma": 1e6})
        narrow = complete(vllm_xargs={"top_sigma": {"n": 1e-6}})
        refusals = []
        for xargs in ({"top_sgma": 1.0}, {"top_sigma": {"k": 1.0}}, {"top_sigma": 0}):
            with pytest.raises(openai.BadRequestError) as caught:
                complete(vllm_xargs=xargs)
            assert caught.value.param == "vllm_xargs"
            refusals.append(str(caught.value))
        expected = greedy()
        served.stop()
    # All tokens are candidates, and only the most likely one.
    assert wide == free != expected == narrow
    says = ("no logits processor 'top_sgma'. Did you mean 'top_sigma'?", "Unknown key 'top_sigma.k'", "greater than 0")
    assert all(text in refusal for text, refusal in zip(says, refusals, strict=True))


def test_an_analysis_is_a_command_like_ours(environment, tmp_path):
    step, out = jax.jit(lambda x: x @ x), str(tmp_path / "out")
    x = step(jnp.ones((256, 256)))
    with stack_profile.capture(tmp_path / "out") as captured:
        jax.block_until_ready(step(x))
    captured.wait()
    command = ["profile", "opcodes", out, "--json"]
    with environment.installed(EXAMPLES / "analysis"):
        group, help_, found, rare = environment.stack_each(
            ["profile", "--help"], ["profile", "opcodes", "--help"], command, [*command, "--least-share", "2"]
        )
    assert "by the kind of instruction." in group.stdout
    assert "--least-share FLOAT" in help_.stdout
    rows = json.loads(found.stdout)["rows"]
    assert sum(row["busy_share"] for row in rows) == pytest.approx(1)
    assert rows[0]["self_s"] > 0 and json.loads(rare.stdout)["rows"] == []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedNibbles:
    """A stranger's weight: two 4-bit codes a byte, the output axis first, one offset and one step size a tile of rows.

    Attributes:
      packed: uint8[..., d_out, d_in / 2]; the code of an even row is in the low half.
      steps, offsets: float32 and int8 [..., d_out, tiles].
    """

    packed: Any
    steps: Any
    offsets: Any

    def __stack_qview__(self) -> QView:
        codes = jnp.stack([self.packed & 15, self.packed >> 4], axis=-1).reshape(*self.packed.shape[:-1], -1)
        qvalue, scale, zero_point = (
            jnp.swapaxes(array, -1, -2) for array in (codes.astype(jnp.int8), self.steps, self.offsets)
        )
        return QView((1, 0), qvalue, scale, zero_point, "nibbles")

    @classmethod
    def draw(cls, rng, *, d_in, d_out, tiles, lead=()):
        packed = rng.integers(0, 256, size=(*lead, d_out, d_in // 2)).astype(np.uint8)
        steps = rng.uniform(0.01, 0.1, size=(*lead, d_out, tiles)).astype(np.float32)
        offsets = rng.integers(6, 10, size=(*lead, d_out, tiles)).astype(np.int8)
        return cls(*map(jnp.asarray, (packed, steps, offsets)))

    def by_hand(self):
        """The same weight [..., d_in, d_out], in numpy and code by code."""
        packed, steps, offsets = (np.asarray(array) for array in (self.packed, self.steps, self.offsets))
        *lead, d_out, bytes_in = packed.shape
        weight = np.zeros((*lead, 2 * bytes_in, d_out), np.float32)
        rows_of_tile = 2 * bytes_in // steps.shape[-1]
        for row, column in np.ndindex(2 * bytes_in, d_out):
            byte, tile = packed[..., column, row // 2].astype(np.int32), row // rows_of_tile
            code = byte >> 4 if row % 2 else byte & 15
            weight[..., row, column] = (code - offsets[..., column, tile]) * steps[..., column, tile]
        return jnp.asarray(weight)


def _linear(rng, lead):
    weight = PackedNibbles.draw(rng, d_in=12, d_out=5, tiles=3, lead=lead)
    return weight, (jnp.asarray(rng.normal(size=(*lead, 7, 12)), jnp.float32),), lambda w, x: ops.linear(x, w)


def _ragged_dot(rng, lead):
    weight = PackedNibbles.draw(rng, d_in=8, d_out=6, tiles=2, lead=(*lead, 3))
    lhs = jnp.asarray(rng.normal(size=(*lead, 9, 8)), jnp.float32)
    group_sizes = jnp.broadcast_to(jnp.asarray([4, 0, 5], jnp.int32), (*lead, 3))
    return weight, (lhs, group_sizes), lambda w, x, sizes: ops.ragged_dot(x, w, sizes)


TRANSFORMS = {
    "jit": ((), jax.jit),
    "vmap": ((2,), jax.vmap),
    "scan": ((2,), lambda call: lambda *args: jax.lax.scan(lambda _, one: ((), call(*one)), (), args)[1]),
    "jit_of_scan_of_vmap": (
        (2, 3),
        lambda call: jax.jit(lambda *args: jax.lax.scan(lambda _, one: ((), jax.vmap(call)(*one)), (), args)[1]),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("draw", [_linear, _ragged_dot])
def test_a_foreign_quantized_array_multiplies_as_its_dequantized_self(draw, transform):
    lead, transformed = TRANSFORMS[transform]
    weight, arguments, call = draw(np.random.default_rng(0), lead)
    actual = transformed(call)(weight, *arguments)
    expected = transformed(call)(weight.by_hand(), *arguments)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 0.1


SOFT_CLIP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "soft-clip"
version = "1.0"
dependencies = ["stack-rl"]

[project.entry-points."stack.plugins.v1"]
soft_clip = "soft_clip"
"""


@pytest.mark.slow  # builds and installs a distribution, and compiles a run
def test_an_algorithm_of_ones_own_is_one_file_of_a_distribution(environment, tmp_path):
    """The README's of stack-rl: a loss in at most 40 lines, chosen by its name."""
    root = Path(__file__).parents[1]
    blocks = re.findall(
        r"^```python\n(.*?)^```", (root / "packages/rl/README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (source,) = (block for block in blocks if "token_losses" in block)
    assert len(source.splitlines()) <= 40
    distribution = tmp_path / "soft-clip"
    distribution.mkdir()
    (distribution / "soft_clip.py").write_text(source)
    (distribution / "pyproject.toml").write_text(SOFT_CLIP)
    sizes = ("--model.layers", "1", "--model.embed", "16", "--model.heads", "2", "--run.steps", "2")
    sizes += ("--data.groups", "2", "--data.group_size", "4", "--data.environment.held_out", "4")
    command = ("train", str(root / "examples/cell.yaml"), "--output", str(tmp_path / "run"), *sizes)
    chosen = ("--objective.name", "soft_clip", "--objective.width", "2.0")
    with environment.installed(distribution):
        assert environment.plugins()["soft-clip"]["registered"] == {"objectives": ["soft_clip"]}
        environment.stack(*command, *chosen)
    assert len(_losses(tmp_path / "run")) == 2
    removed = environment.stack(*command, *chosen, "--output", str(tmp_path / "other"), check=False)
    assert "soft_clip" in removed.stderr
    assert removed.returncode == 2
