"""Runs with a `quant:` section: what they resume, what they write down, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from stack_core.abi.config import parse
from stack_core.chips import Target
from stack_core.cli import main
from stack_core.ops.building import is_quantized
from stack_core.programs.flops import count_flops
from stack_train.checkpoint import named_leaves
from stack_train.data.kinds.text import language_model_shapes
from stack_train.run.compilation import compile_step
from stack_train.run.config import RunConfig, run_config
from stack_train.run.program import build_program
from stack_train.variables.weights import read_model

INT8 = [{"path": "blocks/0/0/feed_forward", "weights": "int8", "activations": "int8", "gradients": "int8"}]
MODEL = {"name": "llama", "vocab_size": 280, "layers": 2, "embed": 32, "heads": 2, "mlp": 64, "max_positions": 64}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """`config(output, quant)` is the path of the config of a run of 6 steps, saved each 3."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    for number in range(20):
        words = rng.choice(["alpha", "beta", "gamma", "return", "(x)", "\n"], 100)
        (texts / f"{number}.txt").write_text(" ".join(words))

    def write(output, quant, **sections):
        mapping = {
            "output": str(tmp_path / output),
            "model": {**MODEL, "dtype": "float32"},
            "data": {"seq_tokens": 16, "batch_size": 4, "source": f"text:{texts}/*.txt"},
            "optimizer": {"name": "adamw", "learning_rate": 0.01},
            "run": {"steps": 6},
            "checkpoint": {"every_steps": 3, "keep": 9},
            "quant": quant,
            **sections,
        }
        path = tmp_path / f"{output}.yaml"
        path.write_text(yaml.safe_dump(mapping))
        return str(path)

    return write


def params(run):
    from flax import nnx

    model, step = read_model(run, run_config(run))
    return named_leaves(nnx.to_pure_dict(nnx.state(model))), step


@pytest.mark.parametrize(
    "quant",
    [
        pytest.param({"method": "qt", "rules": INT8}, id="qt"),
        pytest.param({"method": "qat", "rules": "w8a8"}, id="qat", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_been_stopped(config, tmp_path, quant):
    path = config("whole", quant)
    main(["train", path])
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", stopped)
    (last,) = (folder for folder in (stopped / "checkpoints").iterdir() if folder.name.lstrip("0") == "6")
    shutil.rmtree(last)
    assert params(stopped)[1] == 3
    main(["train", path, "--output", str(stopped), "--resume"])
    (whole, _), (resumed, steps) = params(tmp_path / "whole"), params(stopped)
    assert steps == 6 and whole.keys() == resumed.keys() and not any(map(is_quantized, whole.values()))
    for name, leaf in whole.items():
        np.testing.assert_array_equal(resumed[name], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"method": "qt", "rules": [{"path": "mixer", "weights": "int8"}]}, "matches nothing"),
        ({"method": "qat", "rules": INT8}, "has no gradients to quantize"),
        ({"method": "qta", "rules": INT8}, "Unknown name 'qta' among methods. Did you mean 'qt' or 'qat'?"),
        ({"method": "qat", "rules": "w8a9"}, "Unknown recipe 'w8a9'. Did you mean 'w8a8'?"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(config, tmp_path, capsys, quant, message):
    with pytest.raises(SystemExit) as left:
        main(["train", config("never", quant)])
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


FP8 = {"weights": "fp8_e4m3", "activations": "fp8_e4m3", "gradients": "fp8_e5m2"}
BYTES = {"weights": "int8", "activations": "int8", "gradients": "int8"}


SIZES = {"vocab_size": 512, "layers": 2, "embed": 128, "heads": 4, "mlp": 256, "dtype": "bfloat16"}
MIXTURE = {"name": "qwen3_moe", **SIZES, "kv_heads": 2, "head_dim": 32, "expert_mlp": 256, "experts": 8}
MIXTURE |= {"active_experts": 2}
EXPERTS = "feed_forward/expert_(gate|up|down)"  # not the router, which stays in float32


def compiled_step(types, target, tmp_path, path=".*(attention|feed_forward).*", **sections):
    """The report of a step whose layers train in 8 bits, on four devices that share the parameters."""
    mapping = {
        "output": str(tmp_path / "run"),
        "model": {"name": "llama", **SIZES},
        "data": {"seq_tokens": 128, "batch_size": 8},
        "quant": {"method": "qt", "rules": [{"path": path, **types}]},
        **sections,
    }
    return compile_step(parse(RunConfig, mapping), target)


def check_trains_in_8_bits(report, dtypes):
    """All products of the layers multiply codes; each device gets its shard of their gradients alone."""
    flops = report.cost.flops.by_dtype
    # The head and, without a kernel, attention multiply bfloat16.
    assert sum(flops[dtype] for dtype in dtypes) > 0.7 * sum(flops.values()), flops
    assert set(flops) == {*dtypes, "bfloat16"}, flops
    assert not any(fault.kind == "gradient summed whole" for fault in report.lint.faults)
    scattered = [found for found in report.cost.collectives if found.kind == "reduce-scatter" and found.loops]
    # GPUs also scatter vectors, the ranges of rows.
    matrices = [found.times for found in scattered for array in found.arrays if len(array.dims) == 2]
    assert sum(matrices) == 2 * 7


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("chip", "types", "dtypes"), [("v7x", FP8, ("float8_e4m3fn", "float8_e5m2")), ("v5p", BYTES, ("int8",))]
)
def test_tpus_train_in_8_bits(chip, types, dtypes, tmp_path):
    check_trains_in_8_bits(compiled_step(types, Target(f"{chip}:2x2x1"), tmp_path), dtypes)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("types", "dtypes"), [(FP8, ("float8_e4m3fn", "float8_e5m2")), (BYTES, ("int8",))])
def test_gpus_train_in_8_bits(types, dtypes, tmp_path):
    check_trains_in_8_bits(compiled_step(types, Target("h100:1x1x4"), tmp_path), dtypes)


@pytest.mark.parametrize(
    ("types", "steps"),
    [
        pytest.param(FP8, 40, id="fp8"),
        pytest.param(FP8, 400, id="fp8, longer", marks=pytest.mark.slow),
        pytest.param(BYTES, 400, id="int8, longer", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_learns_in_8_bits_as_in_bfloat16(config, tmp_path, types, steps):
    """The mean loss of the last quarter of the steps differs by at most 2%."""
    sizes = {"vocab_size": 280, "layers": 1, "embed": 32, "mlp": 32, "head_dim": 8, "expert_mlp": 32, "experts": 4}
    sections = {"model": MIXTURE | sizes, "run": {"steps": steps}, "checkpoint": {"every_steps": 0}}

    def final_loss(output, quant):
        path = Path(config(output, quant, **sections))
        if quant is None:
            mapping = yaml.safe_load(path.read_text())
            path.write_text(yaml.safe_dump({name: value for name, value in mapping.items() if name != "quant"}))
        main(["train", str(path)])
        records = map(json.loads, (tmp_path / output / "metrics.jsonl").read_text().splitlines())
        losses = [record["loss"] for record in records if record["kind"] == "train"]
        assert len(losses) == steps and np.mean(losses[-steps // 4 :]) < 0.8 * losses[0]
        return np.mean(losses[-steps // 4 :])

    in_floats = final_loss("floats", None)
    in_codes = final_loss("codes", {"method": "qt", "rules": [{"path": f"{EXPERTS}|attention", **types}]})
    assert in_codes != in_floats
    assert in_codes == pytest.approx(in_floats, rel=0.02)


def check_experts_train_in_8_bits(report, dtypes):
    """All products of the experts multiply codes, in tiles that hold at most half as many rows again."""
    flops, cost = report.cost.flops.by_dtype, report.cost
    # Three products of a row with a matrix forward, and twice as many backward.
    rows = report.work[1] * MIXTURE["active_experts"] // report.devices
    least = SIZES["layers"] * 9 * 2 * rows * SIZES["embed"] * MIXTURE["expert_mlp"]
    assert least <= sum(flops[dtype] for dtype in dtypes) < 1.5 * least, flops
    assert set(flops) == {*dtypes, "bfloat16", "float32"} and not cost.unknown_loops
    assert not any("gmm" in kernel or "ragged" in kernel for kernel in cost.uncounted_kernels), cost.uncounted_kernels


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("chip", "types", "dtypes"), [("v7x", FP8, ("float8_e4m3fn", "float8_e5m2")), ("v5p", BYTES, ("int8",))]
)
def test_tpus_train_experts_in_8_bits(chip, types, dtypes, tmp_path):
    report = compiled_step(types, Target(f"{chip}:2x2x1"), tmp_path, EXPERTS, model=MIXTURE)
    check_experts_train_in_8_bits(report, dtypes)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("types", "dtypes"), [(FP8, ("float8_e4m3fn",)), (BYTES, ("int8",))])
def test_gpus_train_experts_in_8_bits(types, dtypes, tmp_path):
    # The cotangents, in e5m2, are the second operands of the compiled products.
    report = compiled_step(types, Target("h100:1x1x4"), tmp_path, EXPERTS, model=MIXTURE)
    check_experts_train_in_8_bits(report, dtypes)


@pytest.mark.parametrize(
    "section",
    [
        {"quant": {"method": "qt", "rules": INT8}},
        {"lora": {"rules": {"path": "feed_forward", "rank": 2}}},
    ],
    ids=["qt", "lora"],
)
def test_hidden_activations_are_kept_also_if_a_transform_computes_them(config, section):
    def step_flops(remat):
        mapping = yaml.safe_load(Path(config("kept", {})).read_text())
        del mapping["quant"]
        mapping["model"] |= {"remat": remat}
        run = parse(RunConfig, mapping | section)
        program = build_program(run)
        state, batch = program.abstract_state, language_model_shapes(4, 16)
        return count_flops(program.on_mesh(program.step.gradients), state, batch).total

    # The products with the gate and up matrices of 32 x 64 entries, in two layers; with adapters, theirs, too.
    assert step_flops("full") - step_flops({"save": ["hidden"]}) >= 2 * 2 * (2 * 4 * 16 * 32 * 64)
