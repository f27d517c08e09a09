"""Programs for accelerators that are not there: what their attention is, what they send, what a device holds."""

import collections
import math
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from flax import nnx

from stack_core import ops
from stack_core.abi.config import parse
from stack_core.abi.ops import TunedChoice
from stack_core.abi.plugins import registries
from stack_core.chips import Target
from stack_core.chips.targets import use_target
from stack_core.programs.lint import LintedParameter, lint_program
from stack_core.programs.roofline import program_cost, program_memory
from stack_kernels.from_tokamax import missing
from stack_kernels.laboratory.programs import kernels_of
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_serve.llm.compilation import compile_engine
from stack_serve.llm.compiler_options import compiler_options
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.placement import AbstractPlacement
from stack_serve.llm.programs import Programs
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.gpt_oss import GptOssConfig
from stack_train.models.llama import LlamaConfig
from stack_train.run.compilation import compile_step
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program, traced_step

SEQ, ROWS, HEADS = 256, 8, 4
MODEL = {"name": "llama", "vocab_size": 512, "layers": 2, "embed": 256, "heads": HEADS, "kv_heads": 2, "mlp": 512}
MIXTURE = {
    "name": "qwen3_moe",
    "vocab_size": 512,
    "layers": 2,
    "embed": 256,
    "heads": HEADS,
    "kv_heads": 2,
    "head_dim": 128,
    "mlp": 512,
    "expert_mlp": 256,
    "experts": 8,
    "active_experts": 2,
    "dtype": "bfloat16",
}
LLAMA_8B = LlamaConfig(
    layers=32,
    vocab_size=128_256,
    embed=4096,
    heads=32,
    kv_heads=8,
    mlp=14_336,
    max_positions=8192,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
GPT_OSS_120B = GptOssConfig(
    layers=36,
    vocab_size=201_088,
    embed=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    mlp=2880,
    experts=128,
    active_experts=4,
    max_positions=131_072,
    dtype="bfloat16",
    param_dtype="bfloat16",
)


@dataclass(frozen=True)
class OnlyReferences:
    """A tuned table that advises nothing else."""

    def lookup(self, call, chip, *, candidates, forward=None):
        return TunedChoice("reference", None, "to compare with")


@pytest.fixture
def cudnn():
    with pretend_cudnn():
        yield


def step_for(target, folder, model=MODEL, second="tensor"):
    """Compiles the step of a model over fsdp and one more axis, of two parts."""
    fields = {"output": str(folder), "model": model, "mesh": {"fsdp": -1, second: 2}}
    config = parse(
        RunConfig, {**fields, "data": {"seq_tokens": SEQ, "batch_size": 2 * ROWS if second == "stage" else ROWS}}
    )
    program = build_program(config, target.devices)
    with use_target(target):
        return traced_step(config, program).lower().compile()


def gathers(compiled, target):
    """How often a step gathers arrays of each shape."""
    cost = program_cost(compiled, target.devices, target.chip, link_share=target.link_share)
    found = collections.Counter()
    for collective in cost.collectives:
        if collective.kind == "all-gather":
            for array in collective.arrays:
                found[array.dtype, array.dims] += collective.times
    return found


def check_step(target, folder, call, *texts):
    """Each device calls a kernel on its part of the operands, and no more is gathered for it.

    Args:
      call: what the text of a custom call holds, and a reference's program does not.
      texts: what the calls of this kernel hold: first its name, then its operands on one device.
    """
    compiled = step_for(target, folder)
    with ops.use_tuned_table(OnlyReferences()):
        reference = step_for(target, folder)
    of_kernels, of_references = (
        [line for line in program.as_text().splitlines() if call in line and texts[0] in line]
        for program in (compiled, reference)
    )
    assert of_kernels and not of_references
    assert all(text in line for line in of_kernels for text in texts), of_kernels
    assert gathers(compiled, target) and not gathers(compiled, target) - gathers(reference, target)


@pytest.mark.tpu_aot
def test_on_tpus_each_device_runs_splash_attention_on_its_part(tmp_path):
    call = 'custom_call_target="tpu_custom_call"'
    check_step(Target("v6e:2x2"), tmp_path, call, "%splash_mha_", f"bf16[{ROWS // 2},{HEADS // 2},{SEQ},64]")


TPU_KERNELS = {"splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq", "stack_norm"}


@pytest.mark.tpu_aot
@pytest.mark.parametrize("axis", ["stage", "context"])
def test_on_tpus_stages_and_split_sequences_run_all_kernels(tmp_path, axis):
    found = kernels_of(step_for(Target("v5e:2x2"), tmp_path, second=axis).as_text())
    assert all(any(name in kernel for kernel in found) for name in TPU_KERNELS)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("mesh", "gathered"),
    [({"data": 2}, False), ({"fsdp": 8}, True), ({"data": 2, "fsdp": 4, "dcn_fsdp": 2}, True), ({"stage": 2}, False)],
)
def test_on_two_slices_the_lint_tells_what_is_gathered_between_them(tmp_path, mesh, gathered):
    fields = {"output": str(tmp_path), "model": MODEL, "mesh": {"fsdp": -1, **mesh}}
    config = parse(RunConfig, {**fields, "data": {"seq_tokens": SEQ, "batch_size": 4 * ROWS}})
    report = compile_step(config, Target("v5e:2x2*2"))
    assert report.slices == 2 and any("splash_mha_fwd" in kernel for kernel in report.cost.uncounted_kernels)
    sent = {each.kind for each in report.cost.collectives if each.between_slices}
    assert sent >= {"stage": {"collective-permute"}}.get(next(iter(mesh)), {"all-reduce"})
    assert ("gathered across slices" in {fault.kind for fault in report.lint.faults}) is gathered


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
def test_on_gpus_each_device_runs_attention_on_its_part(tmp_path):
    """The kernel is Tokamax's if it is installed, else cuDNN's."""
    kernel = "mosaic_gpu" if missing() is None else "__cudnn$fmha"
    check_step(Target("h100:1x1x4"), tmp_path, "custom_call_target", kernel, f"bf16[{ROWS // 2},{SEQ},{HEADS // 2},64]")


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
def test_a_training_step_for_a_gpu_has_no_loop_and_no_mask(tmp_path):
    """Layers are compiled one by one, with Tokamax's attention if it is installed, and the loss is one chunk."""
    layers = 3
    model = {"name": "llama", "vocab_size": 640, "embed": 512, "heads": 4, "mlp": 1024, "layers": layers}
    fields = {"output": str(tmp_path), "model": model, "data": {"seq_tokens": SEQ, "batch_size": ROWS}}
    target, config = Target("h100:1x1x1"), parse(RunConfig, fields)
    program = build_program(config, target.devices)
    with use_target(target):
        text = traced_step(config, program).lower().compile().as_text()
    found = collections.Counter(re.findall(r" (while|scatter|copy)\(", text))
    # The gradient of the embedding is the scatter; of the layers' saved values nothing is copied.
    assert found["while"] == 0 and found["scatter"] == 1 and found["copy"] < layers + 2
    kernels, masks = collections.Counter(kernels_of(text)), re.findall(rf"pred\[{ROWS},[\d,]*{SEQ},{SEQ}\]", text)
    if missing() is None:
        assert kernels.total() == 3 * layers and all("mosaic_gpu" in kernel for kernel in kernels) and not masks
    else:
        assert kernels.total() == 2 * layers and all("__cudnn$fmha" in kernel for kernel in kernels)


def check_mixture(target, folder, *kernels):
    """Each device calls the kernels in a step with gradients, on its part.

    Args:
      kernels: each a pattern of a kernel's call, and of an operand as one device has it.
    """
    compiled = step_for(target, folder, MIXTURE, "expert")
    calls = [line for line in compiled.as_text().splitlines() if "custom-call(" in line]
    for name, operand in kernels:
        of_kernel = [line for line in calls if re.search(name, line)]
        assert of_kernel, f"no {name} among {kernels_of(compiled.as_text())}"
        assert any(operand in line for line in of_kernel), of_kernel[:2]


@pytest.mark.tpu_aot
def test_on_tpus_each_device_runs_the_kernels_of_a_mixture_on_its_part(tmp_path):
    part = f"{ROWS // 4},{HEADS},{SEQ},128]"
    check_mixture(
        Target("v6e:2x2"),
        tmp_path,
        ("splash_mha_fwd", part),
        ("splash_mha_dkv", part),
        ("splash_mha_dq", part),
        ("%gmm", "bf16[4,256,256]"),
        ("%tgmm", "bf16[4,256,256]"),
        ("stack_norm", f"bf16[{ROWS // 4 * SEQ},256]"),
    )


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")  # its own default, which it will change
def test_on_gpus_each_device_runs_the_kernels_of_a_mixture_on_its_part(tmp_path):
    """With Tokamax its kernels; without it cuDNN's, and the products of the experts are XLA's."""
    part = f"bf16[{ROWS // 4},{SEQ},{HEADS},128]"
    kernels = [(r"__cudnn\$fmha", part)]
    if missing() is None:
        kernels = [("mosaic_gpu", part), ("mosaic_gpu", "bf16[4,256,256]")]
    if missing("jax_triton", "triton") is None:
        kernels.append(("triton", f"bf16[{ROWS // 4 * SEQ},256,1]"))
    check_mixture(Target("h100:1x1x4"), tmp_path, *kernels)


def check_engine(target, *kernels, config=LLAMA_8B, temporary_bytes=2**27, **settings):
    """An engine compiles and fits; what it keeps is split over the devices, and donated.

    Args:
      kernels: what its decoding program calls: each a pattern of a kernel's call, and of an operand as one device has
        it.
      settings: of the engine.

    Returns:
      Its programs, by their names.
    """
    devices = len(target.devices)
    model = nnx.eval_shape(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(
        model, config, name="large", tokenizer=nowhere, origin=nowhere, read=lambda _: iter(())
    )
    settings = EngineConfig(tensor=devices, pages=4096, max_tokens=2048, cache_dtype="bfloat16", **settings)
    programs = compile_engine(checkpoint, settings, target)
    assert set(programs) == {"decode", "prefill"}
    calls = [line for line in programs["decode"].as_text().splitlines() if "custom-call(" in line]
    for name, operand in kernels:
        of_kernel = [line for line in calls if re.search(name, line)]
        assert of_kernel, f"no {name} among {kernels_of(programs['decode'].as_text())}"
        assert all(operand in line for line in of_kernel), of_kernel[:2]
    sizes = {name: 2 * math.prod(leaf.shape) for name, leaf in _named(checkpoint.parameters)}
    head_dim = config.head_dim or config.embed // config.heads
    pages_bytes = 2 * config.layers * 4096 * settings.page_tokens * config.kv_heads * head_dim * 2
    for name, program in programs.items():
        memory = program_memory(program, target.devices[0].platform)
        held_bytes = (
            sum(size for path, size in sizes.items() if name == "decode" or "lm_head" not in path) + pages_bytes
        )
        assert held_bytes / devices <= memory.argument_bytes < 1.01 * held_bytes / devices
        assert memory.aliased_bytes >= pages_bytes / devices
        assert memory.temporary_bytes < temporary_bytes
        assert memory.total_bytes < target.chip.hbm_bytes
    return programs


def check_mixture_engine(target, **settings):
    """A step of an engine whose experts are divided moves activations, and no array of the shape of a weight."""
    widths = {**MIXTURE, "embed": 384, "mlp": 896, "expert_mlp": 640, "vocab_size": 1536, "param_dtype": "bfloat16"}
    config = registries.models[widths.pop("name")].config_class(**widths)
    model = nnx.eval_shape(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(
        model, config, name="mixture", tokenizer=nowhere, origin=nowhere, read=lambda _: iter(())
    )
    sizes = {"pages": 64, "max_tokens": 256, "step_tokens": 64, "max_sequences": 16}
    settings = EngineConfig(**sizes, **settings)
    shardings = AbstractPlacement(
        checkpoint.states, settings.tensor, target.devices, expert=settings.expert
    )._shardings(checkpoint)
    parameters = [
        LintedParameter(name=name, shape=leaf.shape, part=place.shard_shape(leaf.shape), layers=leaf.ndim > 2, bytes=2)
        for (name, leaf), place in zip(_named(checkpoint.parameters), jax.tree.leaves(shardings), strict=True)
        if leaf.size > 2**12  # not norms, whose shapes are those of small tables of a step, too
    ]
    experts = [each for each in parameters if "expert_gate" in each.name]
    assert experts
    assert all(each.part == (*each.shape[:-3], 8 // settings.expert, 384, 640 // settings.tensor) for each in experts)
    for name, program in compile_engine(checkpoint, settings, target).items():
        found = program_cost(program, target.devices, target.chip, link_share=target.link_share).collectives
        assert "all-reduce" in {each.kind for each in found}, name
        largest = lint_program(found, parameters).largest
        assert {parameter: each for parameter, each in largest.items() if each is not None} == {}, name


@pytest.mark.tpu_aot
def test_an_engine_with_divided_experts_gathers_no_weights_on_tpus():
    check_mixture_engine(Target("v6e:2x2"), tensor=2, expert=2)


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
def test_an_engine_with_divided_experts_gathers_no_weights_on_gpus():
    check_mixture_engine(Target("h100:1x1x4"), tensor=2, expert=2)


def _named(tree):
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree))


@pytest.mark.tpu_aot
def test_an_engine_of_an_8b_model_compiles_for_tpus():
    """Attention reads a device's two of eight key heads, in the layout that its kernel wants."""
    check_engine(Target("v6e:2x2"), ("stack_norm", "bf16[32,4096]"), ("stack_paged_attention", "bf16[4096,2,16,128]"))


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_an_engine_whose_pools_hold_keys_and_values_calls_a_kernel_for_prompts_too():
    call = ("ragged_paged_attention", "bf16[4096,16,4,128]")
    # A layer's pool, 64 MiB on a device, fits into VMEM: XLA writes a step's keys and values there.
    programs = check_engine(Target("v6e:2x2"), call, page_layout="psh2d", temporary_bytes=2**28)
    assert any(call[0] in kernel for kernel in kernels_of(programs["prefill"].as_text()))


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
def test_an_engine_of_an_8b_model_compiles_for_gpus():
    check_engine(Target("h100:1x1x4"), temporary_bytes=2**28)  # its paged attention holds scores in main memory


@pytest.mark.gpu_aot
def test_a_decoding_program_for_gpus_is_one_graph(tmp_path):
    """Its loops and conditionals are in the graph, so the host reads nothing while it runs."""
    config = LlamaConfig(layers=2, vocab_size=300, embed=256, heads=4, kv_heads=2, mlp=512, dtype="bfloat16")
    model = nnx.eval_shape(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))
    nowhere = Path("nowhere")
    checkpoint = generative_checkpoint(
        model, config, name="small", tokenizer=nowhere, origin=nowhere, read=lambda _: iter(())
    )
    target = Target("h100:1x1x1")
    settings, placement = EngineConfig(pages=64), AbstractPlacement(checkpoint.states, 1, target.devices)
    with use_target(target):
        programs = Programs(checkpoint, settings, max_tokens=256, pages=64, placement=placement)
        assert programs.buckets.decoding == [4, 8, 16, 32]
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
        programs._lowered(("decode", 4)).compile(compiler_options() | dump)
    (path,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    steps = path.read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\d+: (\w+)", steps) == ["kCommandBuffer"]
    assert steps.count("kCommandBuffer") == 1 and "kWhile" in steps and "kConditional" in steps
    assert steps.count("stack_paged_attention") == config.layers


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.usefixtures("cudnn")
def test_an_engine_of_gpt_oss_120b_compiles_for_eight_gpus():
    check_engine(Target("h100:1x1x8"), config=GPT_OSS_120B, temporary_bytes=2**30)
