"""`stack compile` says what a step takes, without a run, and of TPUs and GPUs without having them."""

import dataclasses
import json
import math
from functools import cached_property
from pathlib import Path

import jax
import pytest

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.abi.errors import ConfigError, HardwareError, ShardingError
from stack_core.chips import Chip, Target
from stack_core.cli import main
from stack_core.programs.flops import model_flops_per_step
from stack_train.commands import compile as compile_command
from stack_train.data.kinds.text import language_model_shapes
from stack_train.diffusion.compilation import compile_sampling
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.run.compilation import compile_step
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program

PUBLISHED = Path(__file__).parents[4] / "examples" / "published"
PARAMETERS = {
    "deepseek_v3": 671_026_404_352,
    "flux_dev": 11_901_408_320,
    "gemma3_4b": 3_880_263_168,
    "gemma3_27b": 27_432_406_640,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_8b": 8_190_735_360,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "wan2_1_14b": 14_288_491_584,
}
# Many more chips, or not measured.
NOT_FOR_64 = ("deepseek_v3", "gemma3_27b", "llama3_70b", "qwen3_vl_30b_a3b", "wan2_1_14b")
DENOISER = """
output: runs/video
model: {name: wan, image_size: 4, frames: 2, channels: 4, layers: 2, heads: 2, head_dim: 8, mlp: 32, text_dim: 16,
  text_tokens: 6}
data: {name: videos, source: videos/*, pipeline: encoders, batch_size: 8}
objective: {name: flow_matching}
"""
CONFIG = """
output: OUTPUT
model: {name: llama, vocab_size: 512, layers: 3, embed: 128, heads: 8, mlp: 256, dtype: float32}
data: {seq_tokens: 128, batch_size: 8}
"""


class Here(Target):
    """This process's first device, as a target with a chip of its own."""

    memory_bytes = 2**30

    def __post_init__(self) -> None:
        pass

    @property
    def chip(self) -> Chip:
        return Chip(
            kind="here",
            unit="device",
            peak_flops={"float32": 1e9},
            hbm_bytes=self.memory_bytes,
            hbm_bandwidth_bytes_s=1e12,
            on_chip_bytes=None,
            link_bandwidth_bytes_s=None,
            provenance="made up",
        )

    @cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        return (jax.devices()[0],)


class Small(Here):
    memory_bytes = 2**20


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("OUTPUT", str(tmp_path / "run")))
    return path


def config_of(path, *overrides):
    return parse(RunConfig, apply_overrides(load_yaml(path), overrides))


def test_a_report_adds_up(config_file):
    config = config_of(config_file)
    report = compile_step(config, Here("here:1"))
    program = build_program(config)
    leaves = jax.tree.leaves(program.abstract_state)
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(program.step.model.variables.trained))
    assert report.work == ("tokens", 8 * 128)
    assert report.model_flops == model_flops_per_step(
        program.on_mesh(program.step.evaluate), program.abstract_variables, language_model_shapes(8, 128)
    )
    memory = report.cost.memory
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves[:-1])  # all but the PRNG key
    assert state_bytes < memory.argument_bytes < state_bytes + 5 * 8 * 128 * 4
    assert memory.aliased_bytes > 0.99 * state_bytes  # the state is donated
    assert 1.0 <= report.cost.flops.total / report.model_flops.total < 1.5
    assert report.cost.roofline.binding == "compute"
    assert 0.5 < report.mfu <= 1.0
    assert report.fits is True
    assert dataclasses.replace(report, memory_bytes=memory.total_bytes - 1).fits is False
    assert dataclasses.replace(report, memory_bytes=None).fits is None


def run_command(capsys, *arguments):
    main(["compile", *map(str, arguments)])
    return capsys.readouterr().out


def test_the_command_prints_a_list_for_programs(config_file, capsys, monkeypatch):
    monkeypatch.setattr("stack_core.chips.targets.Target", Here)
    printed = run_command(capsys, config_file, "--target", "a:1", "--target", "b:1", "--json", "--model.layers", "2")
    first, second = json.loads(printed)
    assert (first["target"], second["target"]) == ("a:1", "b:1")
    assert first["fits"] is True and first["memory"]["total_bytes"] > 0
    assert first["roofline"]["step_s"] > 0 and first["hardware_flops"] >= first["model_flops"] > 0
    assert first["collectives"] == {} and first["mesh"] == {}
    assert not (config_file.parent / "run").exists()


def test_the_command_tells_people_whether_it_fits(config_file, capsys, monkeypatch):
    monkeypatch.setattr("stack_core.chips.targets.Target", Small)
    with pytest.raises(SystemExit) as caught:
        run_command(capsys, config_file, "--target", "small:1", "--check")
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "does NOT fit" in printed.out and "by compute; MFU at most" in printed.out
    assert "does not fit small:1" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "v5p:3x5x7"), "Nearest: v5p:2x4x7"),
        (("--target", "v5p:2x2x1", "--model.layer", "2"), "Unknown key 'model.layer'"),
    ],
)
def test_the_command_refuses_what_no_compiler_is_needed_for(config_file, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run_command(capsys, config_file, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data.seq_tokens=4096", ConfigError, "max_positions is 2048"),
        ("mesh.tensor=3", ShardingError, "tensor=3"),
    ],
)
def test_what_does_not_fit_together_is_refused_as_a_run_would(config_file, override, error, message):
    with pytest.raises(error, match=message):
        compile_step(config_of(config_file, override), Here("here:1"))


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_the_examples_are_the_published_models(name, parameters):
    config = config_of(PUBLISHED / f"{name}.yaml", "mesh.fsdp=1", "mesh.expert=1")
    program = build_program(config, jax.devices()[:1])
    assert sum(leaf.size for leaf in jax.tree.leaves(program.step.model.variables.trained)) == parameters


@pytest.fixture
def denoiser_file(tmp_path):
    path = tmp_path / "video.yaml"
    path.write_text(DENOISER)
    return path


def test_all_steps_of_sampling_are_one_program(denoiser_file):
    config = config_of(denoiser_file, "model.dtype=float32")
    report = compile_sampling(config, SamplerConfig(steps=3), Here("here:1"))
    assert (report.program, report.work) == ("sampling", ("videos", 8))
    # A training step has three times the FLOPs of a call.
    assert report.model_flops == compile_step(config, Here("here:1")).model_flops
    guided = compile_sampling(config, SamplerConfig(steps=4, guidance=5.0), Here("here:1"))
    assert 3 * guided.model_flops.total == 2 * 4 * report.model_flops.total
    # XLA computes keys and values of the text once, before the loop.
    assert 0.85 < guided.cost.flops.total / guided.model_flops.total < 1.0
    memory, text_bytes = guided.cost.memory, 2 * 8 * 6 * 16 * 4  # and the negative text
    assert 0 <= memory.argument_bytes - 4 * guided.parameters - text_bytes < 64  # the PRNG key
    assert memory.output_bytes == 8 * 2 * 4 * 4 * 4 * 4


def test_the_command_compiles_sampling(denoiser_file, config_file, capsys, monkeypatch):
    monkeypatch.setattr("stack_core.chips.targets.Target", Here)
    options = ("--target", "a:1", "--sample", "{steps: 2, name: heun}", "--model.dtype", "float32")
    assert "8 videos a sampling" in (printed := run_command(capsys, denoiser_file, *options))
    assert "a sampling, by compute; MFU at most" in printed
    (found,) = json.loads(run_command(capsys, denoiser_file, *options, "--json"))
    assert (found["program"], found["videos_per_sampling"]) == ("sampling", 8)
    for file, sampler, message in (
        (config_file, "{}", "makes no images. Leave --sample out"),
        (denoiser_file, "{step: 2}", "Unknown key 'sample.step'"),
        (denoiser_file, "{steps: 2, eta: 0.5}", "ddim alone adds"),
    ):
        with pytest.raises(SystemExit) as caught:
            run_command(capsys, file, "--target", "a:1", "--sample", sampler)
        assert caught.value.code == 2 and message in capsys.readouterr().err


def check_gathers(report):
    """Under fsdp a layer is gathered in its loop, never all layers at once."""
    gathers = [found for found in report.cost.collectives if found.kind == "all-gather"]
    matrices = {128 * 128, 128 * 256}
    inside = {math.prod(shape.dims) for found in gathers if found.loops for shape in found.arrays}
    outside = {math.prod(shape.dims) for found in gathers if not found.loops for shape in found.arrays}
    assert inside >= matrices
    assert not (inside | outside) & {3 * size for size in matrices}
    assert not outside & matrices
    assert {found.times for found in gathers if found.loops} == {3}


@pytest.mark.tpu_aot
def test_a_step_for_tpus_gathers_parameters_layer_by_layer(config_file):
    report = compile_step(config_of(config_file, "model.dtype=bfloat16"), Target("v5p:2x2x2"))
    assert report.mesh == {"fsdp": 8} and report.fits is True
    assert report.cost.unknown_loops == ()
    check_gathers(report)


@pytest.mark.tpu_aot
def test_replicas_on_slices_of_tpus_exchange_parameters_in_outer_steps_only(config_file, capsys):
    slices = ("model.dtype=bfloat16", "mesh.data=2", "mesh.fsdp=4")
    together = compile_step(config_of(config_file, *slices), Target("v5p:2x2x1*2"))
    outer = "optimizer.outer={every_steps: 20, replicas: 2}"
    apart = compile_step(config_of(config_file, *slices, "run.steps=20", outer), Target("v5p:2x2x1*2"))
    assert apart.mesh == {"replica": 2, "fsdp": 4} and apart.fits is True
    shard_bytes = 4 * together.parameters / 4  # float32, over the four chips of a slice
    gradients_bytes, none = together.between_slices_bytes()
    assert gradients_bytes > shard_bytes / 2 and none == 0  # reduced in bfloat16 at the least
    every_step, outer_step = apart.between_slices_bytes()
    # The scalars of the metrics, in a vector of 128 numbers. Transfers of parameters are padded to tiles.
    assert every_step <= 4 * 128 and shard_bytes <= outer_step < 2 * shard_bytes
    assert apart.as_mapping()["sent_between_slices_bytes"] == {"every_step": every_step, "outer_step": outer_step}
    compile_command._print(apart)
    assert f"sent between slices: 0.000 MiB in every step and {outer_step / 2**20:.3f} MiB" in capsys.readouterr().out


@pytest.mark.gpu_aot
def test_a_step_for_gpus_gathers_parameters_layer_by_layer(config_file):
    report = compile_step(config_of(config_file, "model.dtype=bfloat16"), Target("h100:1x1x8"))
    assert report.mesh == {"fsdp": 8} and report.fits is True
    assert report.cost.unknown_loops == ()
    check_gathers(report)
    assert any(found.kind == "reduce-scatter" and found.loops for found in report.cost.collectives)


@pytest.mark.parametrize(
    "name",
    [pytest.param("v5p:2x2x1", marks=pytest.mark.tpu_aot), pytest.param("h100:1x1x4", marks=pytest.mark.gpu_aot)],
)
def test_an_offloaded_or_rounded_optimizer_state_leaves_a_devices_memory(config_file, name):
    def memory(*changes):
        return compile_step(config_of(config_file, "model.embed=512", *changes), Target(name)).cost.memory

    whole, offloaded, rounded = memory(), memory("optimizer.offload=true"), memory("optimizer.moments=8bit")
    # Float32 parameters and two moments of the same size.
    assert (whole.host_bytes, rounded.host_bytes) == (0, 0)
    assert offloaded.host_bytes == pytest.approx(2 / 3 * whole.argument_bytes, rel=0.02)
    assert offloaded.argument_bytes == pytest.approx(1 / 3 * whole.argument_bytes, rel=0.02)
    assert offloaded.aliased_bytes < offloaded.argument_bytes + 1024
    assert rounded.argument_bytes == pytest.approx(1 / 2 * whole.argument_bytes, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [pytest.param("v5p:2x2x1", marks=pytest.mark.tpu_aot), pytest.param("h100:1x1x4", marks=pytest.mark.gpu_aot)],
)
def test_offloaded_activations_leave_a_devices_memory(config_file, name):
    def memory(remat):
        changes = (
            "model.layers=8",
            "model.embed=256",
            "data.seq_tokens=512",
            "data.batch_size=16",
            f"model.remat={remat}",
        )
        return compile_step(config_of(config_file, *changes), Target(name)).cost.memory

    kept = "[layer_input, attention, hidden]"
    saved, offloaded = memory(f"{{save: {kept}}}"), memory(f"{{offload: {kept}}}")
    assert saved.host_bytes == 0 < offloaded.host_bytes
    assert offloaded.temporary_bytes < 0.8 * saved.temporary_bytes


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in NOT_FOR_64])
def test_a_step_of_a_published_model_fits_64_tpus(name):
    config, target = config_of(PUBLISHED / f"{name}.yaml", "data.batch_size=64"), Target("v5p:4x4x4")
    report = compile_step(config, target)
    assert report.devices == 64 and report.fits is True
    assert any(kernel.startswith("splash") for kernel in report.cost.uncounted_kernels)
    held_bytes = state_bytes_of_a_device(build_program(config, target.devices))
    assert held_bytes < report.cost.memory.argument_bytes < 1.05 * held_bytes


def state_bytes_of_a_device(program):
    pairs = zip(jax.tree.leaves(program.abstract_state), jax.tree.leaves(program.state_shardings), strict=True)
    parts = [(math.prod(sharding.shard_shape(leaf.shape)), leaf.dtype) for leaf, sharding in pairs]
    return sum(size * dtype.itemsize for size, dtype in parts[:-1])  # all but the PRNG key


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("INTERNAL: no tile for %dot.1 = f32[9,9] dot(%a, %b)", "more"), r"INTERNAL: no tile for %dot\.1"),
        # Less device memory is of no use to a kernel that needs more vector memory than there is.
        (
            (
                "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:",
                "Ran out of memory in memory space vmem while allocating on stack for %gmm.18 = bf16[9,9] custom-call",
            ),
            r"VmemOom: Ran out of memory in memory space vmem while allocating on stack for %gmm\.18",
        ),
    ],
)
def test_an_internal_error_of_the_compiler_names_the_instruction(lines, message, config_file, capsys, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("\n".join((*lines, "  model.py:12:3 [call]", "  step.py:1:1 [f]")))

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(HardwareError, match=message) as caught:
        compile_step(config_of(config_file), Here("here:1"))
    assert "model.py:12:3 [call]" in str(caught.value) and "more" not in str(caught.value).split("Try")[0]
    monkeypatch.setattr("stack_core.chips.targets.Target", Here)
    with pytest.raises(SystemExit) as ended:
        run_command(capsys, config_file, "--target", "a:1")
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.gpu_aot
def test_a_tower_with_heads_of_72_features_compiles_for_gpus_and_nothing_is_gathered_from_all_rows():
    config = config_of(PUBLISHED / "gemma3_27b.yaml", "model.layers=2", "model.vision.layers=2")
    report = compile_step(config, Target("h100:1x1x8"))
    assert report.fits is True and report.lint.faults == ()
    # Neither the head, which is larger, nor the patches of 16 rows of 4 images.
    patches = 16 * 4 * config.model.vision.side_patches**2 * 3 * 14**2
    for found in report.cost.collectives:
        if found.kind in ("all-gather", "all-reduce"):
            assert all(math.prod(array.dims) < patches for array in found.arrays), found


@pytest.mark.tpu_aot
def test_a_step_that_the_compiler_refuses_for_its_memory_does_not_fit(config_file):
    report = compile_step(config_of(config_file, "model.embed=32768", "data.batch_size=1"), Target("v5e:1x1"))
    assert report.fits is False and report.cost is None
    assert report.refusal.startswith("RESOURCE_EXHAUSTED")
    assert report.as_mapping()["fits"] is False
