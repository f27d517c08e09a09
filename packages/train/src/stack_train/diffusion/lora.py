"""LoRA files of the community: adapters of a denoiser and its text encoders, in diffusers' and kohya's layouts.

A module of weight W gets the weight W + scale (alpha / rank) up down. diffusers names modules by their path,
`unet.mid_block.attentions.0.proj_in.lora_A.weight`, and kohya's scripts by the path with underscores,
`lora_unet_mid_block_attentions_0_proj_in.lora_down.weight`; for SDXL they use the paths of the original code.

Source: Hu et al., LoRA, 2021 (arXiv:2106.09685).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax.nnx.traversals import unflatten_mapping
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stack_core.abi.adapters import Adapters
from stack_core.abi.errors import ConversionError
from stack_train.diffusion.components import Component
from stack_train.diffusion.pipeline import Pipeline
from stack_train.diffusion.prompts import TextEncoder
from stack_train.diffusion.two_denoisers import TwoDenoisers
from stack_train.diffusion.unet import UnetConfig
from stack_train.variables.model_variables import ModelVariables, values_of

__all__ = ["KOHYA_FILE", "LORA_FILE", "merge_lora", "write_lora"]

LORA_FILE = "pytorch_lora_weights.safetensors"
KOHYA_FILE = "kohya.safetensors"

_METADATA = "lora_adapter_metadata"
_DOWN, _UP, _ALPHA = "down", "up", "alpha"
# Ends of tensor names, by role: of PEFT, kohya and former versions of diffusers.
_ENDS = {
    ".lora_A.weight": _DOWN,
    ".lora_B.weight": _UP,
    ".lora_down.weight": _DOWN,
    ".lora_up.weight": _UP,
    ".lora.down.weight": _DOWN,
    ".lora.up.weight": _UP,
    "_lora.down.weight": _DOWN,
    "_lora.up.weight": _UP,
    ".lora_linear_layer.down.weight": _DOWN,
    ".lora_linear_layer.up.weight": _UP,
    ".alpha": _ALPHA,
}
_KOHYA_FOLDERS = {
    "lora_unet_": None,
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te_": "text_encoder",
}


@dataclass(frozen=True)
class _Pair:
    """The factors of one module, as in the file: down [rank, d_in, ...], up [d_out, rank, ...]."""

    down: np.ndarray
    up: np.ndarray
    alpha: float | None = None

    def product(self, shape: tuple[int, ...]) -> np.ndarray:
        """Computes (alpha / rank) up down in the shape of the weight."""
        rank = self.down.shape[0]
        scale = 1.0 if self.alpha is None else self.alpha / rank
        product = self.up.reshape(-1, rank).astype(np.float32) @ self.down.reshape(rank, -1).astype(np.float32)
        return scale * product.reshape(shape)


def merge_lora(pipeline: Pipeline, file: Path, scale: float = 1.0) -> Pipeline:
    """Adds the adapters of a file to the weights of a pipeline.

    Raises:
      ConversionError: the pipeline has two denoisers, the file cannot be read or is of another kind (LoHa, LoKr, DoRA),
        or it has modules or shapes that the pipeline lacks; names each.
    """
    if isinstance(pipeline.model, TwoDenoisers):
        raise ConversionError(f"{file} adapts one denoiser, and the model has two. Merge it into a single denoiser.")
    pairs = _read(file)
    kind = pipeline.encoders.pipeline
    models = {kind.folder: (kind.denoiser, pipeline.config, pipeline.model)}
    for folder, (component, _) in kind.text.items():
        model = pipeline.encoders.text.encoders[folder].model
        models[folder] = (component, model.config, model)
    merged: dict[str, Any] = {}
    used: set[str] = set()
    for folder, (component, config, model) in models.items():
        values = {path: np.array(value) for path, value in values_of(model).items()}
        weights = _weights(component, config, values)
        found = dict(_modules(weights))
        names = _spellings(folder, kind.folder, found, config)
        for spelling, name in names.items():
            if spelling not in pairs:
                continue
            _add(found[name], pairs[spelling], scale, file, spelling)
            used.add(spelling)
        merged[folder] = _with_values(model, values) if used & names.keys() else model
    if unknown := sorted(pairs.keys() - used):
        listed = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ConversionError(
            f"{file} adapts {listed}, which the {kind.name} lacks. Take the pipeline that it was trained on."
        )
    encoders = {
        folder: TextEncoder(merged[folder], encoder.tokenizer)
        for folder, encoder in pipeline.encoders.text.encoders.items()
    }
    text = replace(pipeline.encoders.text, encoders=encoders)
    return replace(pipeline, model=merged[kind.folder], encoders=replace(pipeline.encoders, text=text))


def _modules(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Lists modules with a matrix or a convolution, and these weights."""
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.ndim > 1:
            yield name.removesuffix(".weight"), weight


def _weights(component: Component, config: Any, values: Mapping[Any, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns views of a model's parameters, in the names and shapes of its files."""
    return {
        name: view
        for path, value in values.items()
        for name, view in component.tensors_of(config, "/".join(map(str, path)), value).items()
    }


def _with_values(model: Any, values: Mapping[Any, np.ndarray]) -> Any:
    arrays = unflatten_mapping({path: jnp.asarray(value) for path, value in values.items()})
    found = ModelVariables.of(model).merge(arrays)
    found.eval()
    return found


def _add(weight: np.ndarray, pair: _Pair, scale: float, file: Path, name: str) -> None:
    expected = weight.shape[1], weight.shape[0], pair.down.shape[0]
    if (pair.down.shape[1], pair.up.shape[0], pair.up.shape[1]) != expected:
        raise ConversionError(
            f"{file}: {name} has factors of shapes {pair.down.shape} and {pair.up.shape}, which do not fit the weight "
            f"of shape {weight.shape}. Take the pipeline that it was trained on."
        )
    weight[...] = (weight.astype(np.float32) + scale * pair.product(weight.shape)).astype(weight.dtype)


def _read(file: Path) -> dict[str, _Pair]:
    """Reads the factors of a file by module."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    unknown: list[str] = []
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = json.loads((opened.metadata() or {}).get(_METADATA, "{}"))
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                end = next((end for end in _ENDS if name.endswith(end)), None)
                if end is None:
                    unknown.append(name)
                else:
                    module = name.removesuffix(end).replace(".processor.", ".")
                    parts.setdefault(module, {})[_ENDS[end]] = opened.get_tensor(name)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise ConversionError(f"{file} cannot be read as a LoRA file: {error}. Give a safetensors file.") from error
    if unknown:
        raise ConversionError(
            f"{file} has {unknown[0]} and {len(unknown) - 1} more tensors that are not factors of LoRA; LoHa, LoKr and "
            "DoRA are not read. Merge it in the program that made it."
        )
    if half := [module for module, found in parts.items() if not {_DOWN, _UP} <= found.keys()]:
        raise ConversionError(f"{file} has one of the two factors of {half[0]} only. Download it again.")
    return {module: _pair(module, found, metadata) for module, found in parts.items()}


def _pair(module: str, found: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> _Pair:
    if _ALPHA in found:
        return _Pair(found[_DOWN], found[_UP], float(found[_ALPHA].item()))
    part, _, inner = module.partition(".")
    patterns = metadata.get(f"{part}.alpha_pattern") or {}
    alpha = patterns.get(inner, metadata.get(f"{part}.lora_alpha"))
    if metadata.get(f"{part}.use_dora"):
        raise ConversionError(f"{module} is adapted by DoRA, which is not read. Merge it in the program that made it.")
    if alpha is not None and metadata.get(f"{part}.use_rslora"):
        alpha *= found[_DOWN].shape[0] ** 0.5
    return _Pair(found[_DOWN], found[_UP], alpha)


def _spellings(folder: str, denoiser: str, modules: Mapping[str, Any], config: Any) -> dict[str, str]:
    """Maps every spelling of a module in LoRA files to its name in the component's file."""
    names: dict[str, str] = {}
    originals = dict(_original_names(config)) if isinstance(config, UnetConfig) else {}
    prefixes = [prefix for prefix, each in _KOHYA_FOLDERS.items() if (each or denoiser) == folder]
    for module in modules:
        # transformers 5 omits `text_model.`, and some files omit the index in paths of attention outputs.
        for spelling in {module, module.removeprefix("text_model."), module.replace(".to_out.0", ".to_out")}:
            names[f"{folder}.{spelling}"] = module
            if folder == denoiser:  # files that contain only a denoiser omit its folder
                names[spelling] = module
            for prefix in prefixes:
                names[prefix + spelling.replace(".", "_")] = module
        for path, original in originals.items():
            if module == path or module.startswith(f"{path}."):
                spelling = original + module.removeprefix(path)
                names["lora_unet_" + spelling.replace(".", "_")] = module
    return names


_ORIGINAL_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def _original_names(config: UnetConfig) -> Iterator[tuple[str, str]]:
    """Maps modules of a UNet to the names of the original code, which numbers blocks through all levels."""
    levels, number = len(config.widths), 1
    yield from (("conv_in", "input_blocks.0.0"), ("conv_out", "out.2"))
    for part, path in (("time_embed", "time_embedding"), ("label_emb.0", "add_embedding")):
        yield from ((f"{path}.linear_1", f"{part}.0"), (f"{path}.linear_2", f"{part}.2"))
    for level in range(levels):
        for place in range(config.blocks_per_level):
            yield from _original_resnet(f"down_blocks.{level}.resnets.{place}", f"input_blocks.{number}.0")
            yield f"down_blocks.{level}.attentions.{place}", f"input_blocks.{number}.1"
            number += 1
        if level + 1 < levels:
            yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    for place, block in ((0, 0), (1, 2)):
        yield from _original_resnet(f"mid_block.resnets.{place}", f"middle_block.{block}")
    yield "mid_block.attentions.0", "middle_block.1"
    number = 0
    for level, layers in enumerate(reversed(config.transformer_layers)):
        for place in range(config.blocks_per_level + 1):
            yield from _original_resnet(f"up_blocks.{level}.resnets.{place}", f"output_blocks.{number}.0")
            yield f"up_blocks.{level}.attentions.{place}", f"output_blocks.{number}.1"
            number += 1
        if level + 1 < levels:
            after = 2 if layers else 1
            yield f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks.{number - 1}.{after}.conv"


def _original_resnet(path: str, original_path: str) -> Iterator[tuple[str, str]]:
    for name, original in _ORIGINAL_RESNET.items():
        yield f"{path}.{name}", f"{original_path}.{original}"


def write_lora(
    file: Path,
    adapters: Adapters,
    component: Component,
    config: Any,
    *,
    folder: str,
    layout: Literal["diffusers", "kohya"] = "diffusers",
) -> None:
    """Writes the adapters of a denoiser.

    Args:
      folder: folder of the denoiser in a diffusers directory, the prefix of the names.

    Raises:
      ConversionError: an adapter has magnitudes (DoRA), or adapts something other than a matrix; names the adapter.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, factors in adapters.items():
        down, up = np.asarray(factors.down), np.asarray(factors.up)
        if factors.magnitude is not None or down.ndim > 3 or not path.endswith("/kernel"):
            raise ConversionError(
                f"{path} cannot be written to a LoRA file, which has products of two matrices. Convert the run with "
                "its adapters merged: stack convert RUN hf:DIR."
            )
        # `tensors_of` returns the names and the shapes for a placeholder of the weight.
        weight = np.empty((*down.shape[:-1], up.shape[-1]), np.bool_)
        named = component.tensors_of(config, path, weight)
        lead = down.ndim == 3
        for layer, (name, view) in enumerate(named.items()):
            first, second = (down[layer].T, up[layer].T) if lead else (down.T, up.T)
            trailing = (1,) * (view.ndim - 2)
            module = name.removesuffix(".weight")
            tensors |= _tensors(
                module, first.reshape(*first.shape, *trailing), second.reshape(*second.shape, *trailing),
                factors.scale, folder, layout,
            )  # fmt: skip
    # `ascontiguousarray` would make vectors of the alphas.
    save_file({name: np.asarray(each, order="C") for name, each in tensors.items()}, file, {"format": "pt"})


def _tensors(
    module: str, down: np.ndarray, up: np.ndarray, scale: float, folder: str, layout: str
) -> dict[str, np.ndarray]:
    if layout == "kohya":
        name = "lora_unet_" + module.replace(".", "_")
        alpha = np.asarray(scale * len(down), np.float32)
        return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    # Without alphas diffusers does not scale the product, so `up` contains the scale.
    return {f"{folder}.{module}.lora_A.weight": down, f"{folder}.{module}.lora_B.weight": (scale * up).astype(up.dtype)}
