"""LoRA files in the community's layouts, merged into a tiny pipeline of SDXL and written from adapters."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from safetensors.numpy import save_file

from stack_core.abi.adapters import LowRankFactors
from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConversionError
from stack_train.diffusion import autoencoder_kl, unet
from stack_train.diffusion.lora import KOHYA_FILE, LORA_FILE, merge_lora, write_lora
from stack_train.diffusion.objectives import EpsilonConfig
from stack_train.diffusion.pipeline import Pipeline
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.peft import FORMAT
from stack_train.run.config import RunConfig
from stack_train.variables.model_variables import ModelVariables, values_of
from stack_train.variables.trained_adapters import RunAdapters

from . import shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
CONFIG = unet.UnetConfig(
    image_size=8, widths=(8, 8), blocks_per_level=1, transformer_layers=(0, 2), middle_layers=2, heads=(2, 2),
    groups=4, text_dim=64, pooled_dim=32, text_tokens=6, size_features=4, zero_unconditional=True, **FLOATS,
)  # fmt: skip
QUERY = "down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q"
OUTPUT = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0"
PROJECTION = "up_blocks.0.attentions.1.proj_in"
CONVOLUTION = "up_blocks.1.resnets.0.conv1"
TEXT = "text_model.encoder.layers.0.self_attn.q_proj"
RANK, RANDOM = 3, np.random.default_rng(7)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    sizes = {"image_size": shapes.SIZE, "widths": (4, 8), "groups": 4, "blocks_per_level": 1, "attends": False}
    autoencoder = jax.eval_shape(
        lambda: autoencoder_kl.FAMILY.build(
            autoencoder_kl.AutoencoderKlConfig(**sizes, **FLOATS), key=jax.random.key(0)
        )
    )
    name = "StableDiffusionXLPipeline"
    encoders = shapes.encoders(tmp_path_factory.mktemp("none"), autoencoder, name=name)
    # Values from NumPy, since JAX would compile a program for each shape.
    variables, random = ModelVariables.of(nnx.eval_shape(lambda: unet.Unet(CONFIG, key=jax.random.key(1)))), RANDOM
    values = {path: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype) for path, leaf in variables.shapes.items()}
    model = variables.merge(unflatten_mapping(values))
    return Pipeline(CONFIG, model, encoders, EpsilonConfig(), SamplerConfig())


def tensors(pipeline):
    """The weights of the denoiser and the second text encoder in the names of their files."""
    second = pipeline.encoders.text.encoders["text_encoder_2"].model
    component, _ = pipeline.encoders.pipeline.text["text_encoder_2"]
    parts = (("unet", unet.COMPONENT, CONFIG, pipeline.model), ("text_encoder_2", component, second.config, second))
    return {
        f"{folder}.{name}": np.array(tensor)
        for folder, component, config, model in parts
        for path, value in values_of(model).items()
        for name, tensor in component.tensors_of(config, "/".join(map(str, path)), np.asarray(value)).items()
    }


def factors(shape, random):
    trailing = (1,) * len(shape[2:])
    down = random.normal(size=(RANK, *shape[1:])).astype(np.float32)
    return down, random.normal(size=(shape[0], RANK, *trailing)).astype(np.float32)


DIFFUSERS = {f"unet.{each}": f"unet.{each}" for each in (QUERY, OUTPUT, PROJECTION, CONVOLUTION)}
DIFFUSERS[f"text_encoder_2.{TEXT}"] = f"text_encoder_2.{TEXT}"
FORMER = {
    f"unet.{QUERY.replace('to_q', 'processor.to_q')}": f"unet.{QUERY}",
    f"unet.{OUTPUT.replace('to_out.0', 'processor.to_out')}": f"unet.{OUTPUT}",
}
KOHYA = {"lora_unet_" + each.replace(".", "_"): f"unet.{each}" for each in (QUERY, OUTPUT, PROJECTION, CONVOLUTION)} | {
    "lora_te2_" + TEXT.replace(".", "_"): f"text_encoder_2.{TEXT}"
}
ORIGINAL = {
    "lora_unet_input_blocks_3_1_transformer_blocks_1_attn1_to_q": f"unet.{QUERY}",
    "lora_unet_input_blocks_3_1_transformer_blocks_0_attn2_to_out_0": f"unet.{OUTPUT}",
    "lora_unet_middle_block_1_proj_out": "unet.mid_block.attentions.0.proj_out",
    "lora_unet_output_blocks_1_1_proj_in": f"unet.{PROJECTION}",
    "lora_unet_output_blocks_1_2_conv": "unet.up_blocks.0.upsamplers.0.conv",
    "lora_unet_output_blocks_2_0_in_layers_2": f"unet.{CONVOLUTION}",
    "lora_unet_input_blocks_2_0_op": "unet.down_blocks.0.downsamplers.0.conv",
}
PEFT_ENDS, KOHYA_ENDS = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")
LAYOUTS = {
    "diffusers": (DIFFUSERS, PEFT_ENDS, None),
    "diffusers_with_metadata": (DIFFUSERS, PEFT_ENDS, "metadata"),
    "former_diffusers": (FORMER, ("_lora.down.weight", "_lora.up.weight"), None),
    "kohya": (KOHYA, KOHYA_ENDS, "alpha"),
    "kohya_with_original_names": (ORIGINAL, KOHYA_ENDS, "alpha"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_merged(layout, pipeline, tmp_path):
    names, ends, alphas = LAYOUTS[layout]
    before, random, stored, expected = tensors(pipeline), np.random.default_rng(0), {}, {}
    alpha = RANK if alphas is None else 2.0
    for spelling, target in names.items():
        shape = before[f"{target}.weight"].shape
        down, up = factors(shape, random)
        stored |= {spelling + ends[0]: down, spelling + ends[1]: up}
        if alphas == "alpha":
            stored[f"{spelling}.alpha"] = np.asarray(alpha, np.float32)
        product = (up.reshape(shape[0], RANK) @ down.reshape(RANK, -1)).reshape(shape)
        expected[f"{target}.weight"] = before[f"{target}.weight"] + 0.5 * alpha / RANK * product
    settings = {"unet.lora_alpha": 1.0, "unet.alpha_pattern": {}, "text_encoder_2.lora_alpha": alpha}
    settings["unet.alpha_pattern"] = {each.removeprefix("unet."): alpha for each in names}
    metadata = {"lora_adapter_metadata": json.dumps(settings)} if alphas == "metadata" else None
    save_file(stored, tmp_path / "lora.safetensors", metadata)
    after = tensors(merge_lora(pipeline, tmp_path / "lora.safetensors", 0.5))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        np.testing.assert_allclose(tensor, expected.get(name, before[name]), rtol=1e-5, atol=1e-5, err_msg=name)
        assert (name in expected) == (np.abs(tensor - before[name]).max() > 0.01), name


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_adapters_are_written_and_merged_again(layout, pipeline, tmp_path):
    random, leaf = np.random.default_rng(0), "down_blocks/1/attentions/0"
    adapters = {
        f"{leaf}/blocks/attn1/to_q/kernel": LowRankFactors(
            random.normal(size=(2, 8, RANK)).astype("f"), random.normal(size=(2, RANK, 8)).astype("f"), 0.5
        ),
        f"{leaf}/proj_in/kernel": LowRankFactors(
            random.normal(size=(8, RANK)).astype("f"), random.normal(size=(RANK, 8)).astype("f"), 2.0
        ),
    }
    file = tmp_path / "lora.safetensors"
    write_lora(file, adapters, unet.COMPONENT, CONFIG, folder="unet", layout=layout)
    merged = values_of(merge_lora(pipeline, file).model)
    for path, value in values_of(pipeline.model).items():
        name = "/".join(map(str, path))
        each = adapters.get(name)
        wanted = value if each is None else value + each.scale * (each.down @ each.up)
        np.testing.assert_allclose(merged[path], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    with pytest.raises(ConversionError, match="cannot be written to a LoRA file"):
        magnitudes = {f"{leaf}/proj_in/kernel": replace(adapters[f"{leaf}/proj_in/kernel"], magnitude=np.ones(8))}
        write_lora(file, magnitudes, unet.COMPONENT, CONFIG, folder="unet")


def test_the_adapters_of_a_run_are_written_in_both_layouts(pipeline, tmp_path, monkeypatch):
    random, leaf = np.random.default_rng(0), "mid_block/attentions/0/proj_out/kernel"
    down, up = random.normal(size=(8, RANK)).astype("f"), random.normal(size=(RANK, 8)).astype("f")
    config = parse(RunConfig, {"output": "none", "model": to_mapping(CONFIG)})
    found = RunAdapters({leaf: LowRankFactors(down, up, 0.5)}, config, 1, None)
    monkeypatch.setattr("stack_train.peft.format.run_adapters", lambda run: found)
    FORMAT.export_run(tmp_path / "run", tmp_path / "lora")
    path = tuple(int(part) if part.isdecimal() else part for part in leaf.split("/"))
    wanted = values_of(pipeline.model)[path] + 0.5 * (down @ up)
    for file in (LORA_FILE, KOHYA_FILE):
        merged = values_of(merge_lora(pipeline, tmp_path / "lora" / file).model)[path]
        np.testing.assert_allclose(merged, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConversionError, match="name no base; leave out --base-model"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "other", base_model="other")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {"unet.other.lora_A.weight": (2, 8), "unet.other.lora_B.weight": (8, 2)},
            "adapts unet.other, which the Stable",
        ),
        ({"lora_unet_mid_block.hada_w1_a": (2, 8)}, "LoHa, LoKr and DoRA are not read"),
        ({f"unet.{QUERY}.lora_A.weight": (2, 8)}, "one of the two factors"),
        (
            {f"unet.{QUERY}.lora_A.weight": (2, 8), f"unet.{QUERY}.lora_B.weight": (9, 2)},
            r"shapes \(2, 8\) and \(9, 2\)",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(stored, message, pipeline, tmp_path):
    save_file({name: np.ones(shape, np.float32) for name, shape in stored.items()}, tmp_path / "lora.safetensors")
    with pytest.raises(ConversionError, match=message):
        merge_lora(pipeline, tmp_path / "lora.safetensors")
    (tmp_path / "lora.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConversionError, match="cannot be read as a LoRA file"):
        merge_lora(pipeline, tmp_path / "lora.safetensors")
