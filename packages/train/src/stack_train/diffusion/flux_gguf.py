"""FLUX denoisers in GGUF files, whose tensors have the names of Black Forest Labs' code.

A tensor may contain several tensors of diffusers as consecutive rows: `img_attn.qkv` has queries, keys and values, and
`linear1` has the rows of the feed-forward layer, too. The last modulation has its shift before its scale, and diffusers
has the scale first. Matrices are dequantized on loading.

Source: the files of city96 (ComfyUI-GGUF), architecture "flux"; Black Forest Labs, FLUX.1, 2024, for the names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_core.abi.local_paths import local_path
from stack_train.diffusion import flux
from stack_train.diffusion.components import Component, StoredComponent, outline, read_component_config
from stack_train.gguf.blocks import dequantize, is_readable
from stack_train.gguf.library import library
from stack_train.gguf.reader import StoredTensor, open_file

__all__ = ["load_denoiser"]

_SCHEME = "gguf:"
_ARCHITECTURE, _FLUX = "general.architecture", "flux"
_PREFIX = "model.diffusion_model."  # in files that were converted from a checkpoint with other parts

_ENDS = ("weight", "bias")
# Modules of a file, and the modules of diffusers that they contain. Scales of norms are named in full.
_GUIDANCE = {
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
}
_LAST_MODULATION = "final_layer.adaLN_modulation.1"
_OUTER = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    _LAST_MODULATION: ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
_DOUBLE = {
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
_SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm.scale": ("attn.norm_q.weight",),
    "norm.key_norm.scale": ("attn.norm_k.weight",),
}


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a tensor in a file.

    Attributes:
      tensor: the tensor of the file.
      is_swapped: True to read the second half of the rows before the first half.
    """

    tensor: StoredTensor
    start: int
    stop: int
    is_swapped: bool

    def read(self) -> np.ndarray:
        """Dequantizes the rows, float32[rows, ...]."""
        tensor, gguf = self.tensor, library()
        if len(tensor.shape) == 1:
            rows = dequantize(gguf, tensor)[self.start : self.stop]
        else:
            shape = (self.stop - self.start, *tensor.shape[1:])
            rows = dequantize(gguf, StoredTensor(shape, tensor.tensor_type, tensor.data[self.start : self.stop]))
        return np.roll(rows, len(rows) // 2, axis=0) if self.is_swapped else rows


def load_denoiser(component: Component, directory: Path, address: str, dtype: str) -> tuple[Any, Any]:
    """Reads the denoiser of a FLUX directory from a GGUF file in place of the directory's weights.

    Args:
      directory: folder of the denoiser, of which only `config.json` is read.
      address: gguf:FILE.
      dtype: dtype of the parameters and the activations.

    Raises:
      ConversionError: the file has another format or architecture, the directory has another denoiser, or the tensors
        do not fit its config; names each tensor.
    """
    if not address.startswith(_SCHEME):
        raise ConversionError(f"The denoiser is {address!r}; expected gguf:FILE, such as gguf:flux1-dev-Q4_K_S.gguf.")
    if component is not flux.COMPONENT:
        raise ConversionError(
            f"{address} replaces the denoiser of a FLUX directory, and {directory} has a {component.class_name}."
        )
    path = local_path(address.removeprefix(_SCHEME))
    gguf = library()
    file = open_file(gguf, path)
    if (architecture := file.settings.get(_ARCHITECTURE)) != _FLUX:
        raise ConversionError(
            f"{path} has a model of architecture {architecture!r}; denoisers are read of {_FLUX!r}. Give such a file."
        )
    config = read_component_config(component, directory, dtype=dtype, param_dtype=dtype)
    abstract, views = outline(component, config)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in file.tensors.items()}
    contents = _contents(config)
    _check(gguf, path, directory, contents, {name: view.shape for name, view in views.items()}, tensors)
    rows = dict(_rows_of(contents, views, tensors))
    model = StoredComponent(component, config, abstract, rows).read()
    file.release_pages()
    return config, model


def _contents(config: flux.FluxConfig) -> dict[str, tuple[str, ...]]:
    """Maps each tensor of a file to the tensors of diffusers in its rows."""
    outer = _OUTER if config.guidance is None else {**_OUTER, **_GUIDANCE}
    parts = [("", "", outer)]
    parts += [(f"double_blocks.{n}.", f"transformer_blocks.{n}.", _DOUBLE) for n in range(config.double_layers)]
    parts += [(f"single_blocks.{n}.", f"single_transformer_blocks.{n}.", _SINGLE) for n in range(config.single_layers)]
    contents: dict[str, tuple[str, ...]] = {}
    for ours, theirs, modules in parts:
        for module, names in modules.items():
            ends = ("",) if module.endswith(".scale") else tuple(f".{end}" for end in _ENDS)
            contents |= {f"{ours}{module}{end}": tuple(f"{theirs}{name}{end}" for name in names) for end in ends}
    return contents


def _check(
    gguf: Any,
    path: Path,
    directory: Path,
    contents: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
) -> None:
    expected = {
        name: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:]) for name, parts in contents.items()
    }
    problems = [f"{name} is missing; expected shape {shape}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"{name} is unexpected; it has shape {tensor.shape}")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tensor.shape}; expected {expected[name]}")
        elif not is_readable(gguf, tensor):
            problems.append(f"{name} is {tensor.tensor_type.name}, which is not read")
    if problems:
        raise ConversionError(
            f"The tensors of {path} do not fit {directory / 'config.json'} ({len(problems)}):\n  "
            + "\n  ".join(sorted(problems))
        )


def _rows_of(
    contents: Mapping[str, tuple[str, ...]], views: Mapping[str, np.ndarray], tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, _Rows]]:
    """Lists the tensors of diffusers with their rows in the file."""
    for name, parts in contents.items():
        start, is_swapped = 0, name.startswith(_LAST_MODULATION)
        for part in parts:
            stop = start + len(views[part])
            yield part, _Rows(tensors[name], start, stop, is_swapped)
            start = stop
