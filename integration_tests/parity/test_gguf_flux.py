"""FLUX denoisers in GGUF files with Black Forest Labs' names, against diffusers, which reads the same files."""

import shutil

import diffusers
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.commands.convert import convert
from stack_train.commands.sample import sample
from stack_train.diffusion import flux, unet
from stack_train.diffusion.flux_gguf import load_denoiser
from stack_train.diffusion.sampling import open_images
from stack_train.run.config import run_config
from stack_train.variables.model_variables import values_of
from stack_train.variables.weights import read_model

from .test_diffusers import drawn, of_torch
from .test_text_encoders import pipeline, tokenizers_of

__all__ = ["pipeline", "tokenizers_of"]  # fixtures

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
# The rows of Q8_0 are multiples of 32; the 16 features of a patch stay F16.
SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}


DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.norm.query_norm.scale": ("attn.norm_q.weight",),
    "img_attn.norm.key_norm.scale": ("attn.norm_k.weight",),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.norm.query_norm.scale": ("attn.norm_added_q.weight",),
    "txt_attn.norm.key_norm.scale": ("attn.norm_added_k.weight",),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm.scale": ("attn.norm_q.weight",),
    "norm.key_norm.scale": ("attn.norm_k.weight",),
}
OUTER = {"img_in": ("x_embedder",), "txt_in": ("context_embedder",), "final_layer.linear": ("proj_out",)} | {
    f"{ours}_in.{layer}": (f"time_text_embed.{theirs}_embedder.linear_{number}",)
    for ours, theirs in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
    for number, layer in enumerate(("in_layer", "out_layer"), 1)
}


def of_black_forest_labs(theirs):
    """The tensors of a model by their original names."""
    state, sizes = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}, theirs.config
    parts = [("", "", OUTER)]
    parts += [(f"double_blocks.{n}.", f"transformer_blocks.{n}.", DOUBLE) for n in range(sizes.num_layers)]
    parts += [
        (f"single_blocks.{n}.", f"single_transformer_blocks.{n}.", SINGLE) for n in range(sizes.num_single_layers)
    ]
    found = {
        f"{one}{name}{end}": np.concatenate([state[f"{other}{each}{end}"] for each in sources])
        for one, other, modules in parts
        for name, sources in modules.items()
        for end in ("", ".weight", ".bias")
        if f"{other}{sources[0]}{end}" in state
    }
    for end in ("weight", "bias"):
        scale, shift = np.split(state[f"norm_out.linear.{end}"], 2)
        found[f"final_layer.adaLN_modulation.1.{end}"] = np.concatenate([shift, scale])
    return found


def write(path, tensors, *, kind=gguf.GGMLQuantizationType.F16, architecture="flux"):
    writer = gguf.GGUFWriter(path, architecture)
    for name, tensor in tensors.items():
        each = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[each][0]:
            each = gguf.GGMLQuantizationType.F16
        writer.add_tensor(name, gguf.quants.quantize(tensor, each), raw_dtype=each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def narrow(monkeypatch):
    """Lets diffusers convert models of our width: its conversion has FLUX's, 3072, as a constant."""
    code = convert_flux_transformer_checkpoint_to_diffusers.__code__
    assert 3072 in code.co_consts
    width = SIZES["attention_head_dim"] * SIZES["num_attention_heads"]
    constants = tuple(width if each == 3072 else each for each in code.co_consts)
    monkeypatch.setattr(convert_flux_transformer_checkpoint_to_diffusers, "__code__", code.replace(co_consts=constants))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("kind", "guidance"), [("F16", True), ("Q8_0", False), ("BF16", True)])
def test_a_denoiser_of_a_gguf_file_predicts_as_in_diffusers(kind, guidance, tmp_path):
    made = drawn(diffusers.FluxTransformer2DModel(**SIZES, guidance_embeds=guidance), std=0.1)
    made.save_config(tmp_path / "transformer")
    tensors, path = of_black_forest_labs(made), tmp_path / "flux.gguf"
    assert sum(map(np.size, tensors.values())) == sum(each.numel() for each in made.parameters())
    write(path, tensors, kind=gguf.GGMLQuantizationType[kind])
    theirs_path = path
    if kind == "Q8_0":
        # diffusers multiplies codes and scales in float16, so it gets the exact products in another file.
        read = {
            each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors
        }
        assert all(read[name].shape == tensor.shape for name, tensor in tensors.items())
        theirs_path = tmp_path / "floats.gguf"
        write(theirs_path, read, kind=gguf.GGMLQuantizationType.F32)
    theirs = diffusers.FluxTransformer2DModel.from_single_file(
        theirs_path,
        config=str(tmp_path / "transformer"),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    config, ours = load_denoiser(flux.COMPONENT, tmp_path / "transformer", f"gguf:{path}", "float32")
    rng = np.random.default_rng(0)
    images, text = rng.standard_normal((2, 6, 10, 4), np.float32), rng.standard_normal((2, 5, 32), np.float32)
    pooled, timesteps = rng.standard_normal((2, 64), np.float32), np.array([30.0, 700.0], np.float32)
    condition = {"text": text, "pooled": pooled} | ({"guidance": np.full(2, 2.5, np.float32)} if guidance else {})
    packed = diffusers.FluxPipeline._pack_latents(of_torch(images), 2, 4, 6, 10)
    with torch.no_grad():
        wanted = theirs(
            packed,
            encoder_hidden_states=torch.tensor(text),
            pooled_projections=torch.tensor(pooled),
            timestep=torch.tensor(timesteps) / 1000,
            img_ids=diffusers.FluxPipeline._prepare_latent_image_ids(2, 3, 5, "cpu", torch.float32),
            txt_ids=torch.zeros(5, 3),
            guidance=torch.full((2,), 2.5) if guidance else None,
        ).sample
    wanted = diffusers.FluxPipeline._unpack_latents(wanted, 6 * 8, 10 * 8, 8).numpy().transpose(0, 2, 3, 1)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(ours.__call__)(*jax.tree.map(jnp.asarray, (images, timesteps, condition)))
    assert config.guidance == (3.5 if guidance else None)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)


def test_a_directory_without_a_transformer_is_sampled_and_converted_with_a_file(pipeline, tmp_path, monkeypatch):
    made, directory = pipeline
    path = tmp_path / "flux.gguf"
    # Files made from whole checkpoints have the prefix.
    tensors = {f"model.diffusion_model.{name}": each for name, each in of_black_forest_labs(made.transformer).items()}
    write(path, tensors, kind=gguf.GGMLQuantizationType.F32)
    shutil.copytree(directory, tmp_path / "dir", ignore=shutil.ignore_patterns("diffusion_pytorch_model.*"))
    shutil.copytree(directory / "vae", tmp_path / "dir" / "vae", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    options = {"prompt": ("a red circle",), "steps": 2, "size": "16"}
    sample(f"hf:{directory}", **options, out=tmp_path / "one.png")
    sample("hf:dir", **options, denoiser="gguf:flux.gguf", out=tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()
    convert("hf:dir", "run", denoiser="gguf:flux.gguf")
    expected = values_of(open_images(f"hf:{directory}").model)
    found = values_of(read_model(tmp_path / "run", run_config(tmp_path / "run"))[0])
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=str(name))
    with pytest.raises(ConfigError, match="Denoisers are replaced in diffusers directories"):
        sample("run", **options, denoiser="gguf:flux.gguf")
    with pytest.raises(ConversionError, match="'run' does not have one"):
        convert("run", "hf:again", denoiser="gguf:flux.gguf")
    with pytest.raises(ConversionError, match="--denoiser is for whole directories of FLUX"):
        convert("hf:dir/transformer", "other", denoiser="gguf:flux.gguf")


def test_files_that_do_not_fit_are_refused_by_the_names_of_their_tensors(pipeline, tmp_path):
    made, directory = pipeline
    tensors, path, folder = of_black_forest_labs(made.transformer), tmp_path / "flux.gguf", directory / "transformer"
    rows = tensors["double_blocks.0.img_attn.qkv.weight"]
    wrong = tensors | {"double_blocks.0.img_attn.qkv.weight": rows[:-1], "mask_in.weight": rows}
    del wrong["guidance_in.in_layer.weight"]
    write(path, wrong)
    with pytest.raises(ConversionError) as raised:
        load_denoiser(flux.COMPONENT, folder, f"gguf:{path}", "float32")
    assert str(raised.value).splitlines() == [
        f"The tensors of {path} do not fit {folder}/config.json (3):",
        "  double_blocks.0.img_attn.qkv.weight has shape (95, 32); expected (96, 32)",
        "  guidance_in.in_layer.weight is missing; expected shape (32, 256)",
        "  mask_in.weight is unexpected; it has shape (96, 32)",
    ]
    write(path, tensors, architecture="sd3")
    with pytest.raises(ConversionError, match="has a model of architecture 'sd3'; denoisers are read of 'flux'"):
        load_denoiser(flux.COMPONENT, folder, f"gguf:{path}", "float32")
    with pytest.raises(ConversionError, match=r"replaces the denoiser of a FLUX directory, and .*UNet2DConditionModel"):
        load_denoiser(unet.COMPONENT, folder, f"gguf:{path}", "float32")
    with pytest.raises(ConversionError, match="expected gguf:FILE, such as"):
        load_denoiser(flux.COMPONENT, folder, str(path), "float32")
