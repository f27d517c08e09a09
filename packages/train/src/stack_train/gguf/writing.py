"""Writing of GGUF files: the type of each tensor, the settings, and the values one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_core import ops
from stack_core.abi.formats import Progress
from stack_train.gguf.fitted import FITTED, K_QUANTS, quantize
from stack_train.gguf.importance import Importance
from stack_train.gguf.names import ROPE_FREQUENCIES, ROUTER, Architecture, reordered_heads
from stack_train.gguf.settings import rope_factors
from stack_train.models.weight_map import WeightRule

__all__ = ["Tensor", "add_setting", "tensors_of", "write_tensors"]

# Types of rows that do not divide into blocks of 256, as in llama.cpp.
_IN_BLOCKS_OF_32 = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
      name: name in the file.
      shape: shape of the tensor.
      type: GGML type in the file.
      read: returns the values in the layout of the file, before quantization.
      importance: mean squared inputs, float32[..., 1, d_in], or None.
    """

    name: str
    shape: tuple[int, ...]
    type: Any
    read: Callable[[], np.ndarray]
    importance: np.ndarray | None = None


def tensors_of(
    gguf: Any,
    config: Any,
    architecture: Architecture,
    leaves: Mapping[str, Any],
    stored: str,
    importance: Importance | None,
) -> Iterator[Tensor]:
    """Yields the tensors of a file.

    Args:
      gguf: the package.
      config: config of the model.
      architecture: its architecture in GGUF.
      leaves: parameters by path.
      stored: storage type, from `GgufFormat.stored_types`.
      importance: mean squared inputs of the matrices, or None.
    """
    heads = reordered_heads(config)
    for rule in architecture.rules(config):
        for name, shape in rule.tensor_shapes(leaves[rule.parameter].shape).items():
            # Defaults bind the values of this iteration; the tensor is read after the loop has ended.
            def read(rule: WeightRule = rule, name: str = name) -> np.ndarray:
                view = rule.tensors(np.asarray(leaves[rule.parameter], np.float32))[name]
                return architecture.stored(name, view, heads)

            own = architecture.name_of(name)
            is_logits = name == ("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
            kind = _mixed(stored, own, config.layers, is_logits=is_logits)
            type_ = _type_of(gguf, own, shape, kind)
            columns = None
            if importance is not None and type_.name in FITTED:
                columns = importance.of(rule, name, own, leaves[rule.parameter].shape)
            yield Tensor(own, shape, type_, read, columns)
    if isinstance(config.rope_scaling, ops.Llama3Scaling):
        factors = rope_factors(config.rope_scaling, config)
        yield Tensor(ROPE_FREQUENCIES, factors.shape, gguf.GGMLQuantizationType.F32, lambda: factors)


def _mixed(stored: str, tensor: str, layers: int, *, is_logits: bool) -> str:
    """Returns the type that llama.cpp gives a matrix in a file of the type `stored` (`llama_tensor_get_type`)."""
    if stored in ("F16", "Q8_0"):
        return stored
    if is_logits:
        return "Q6_K"
    if not stored.endswith("_M"):
        return stored
    _, _, rest = tensor.partition("blk.")
    number = int(rest.partition(".")[0]) if rest else 0
    eighth = layers // 8
    is_sensitive = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
    is_mixed = "attn_v." in tensor or "ffn_down" in tensor
    return "Q6_K" if is_mixed and is_sensitive else stored.removesuffix("_M")


def _type_of(gguf: Any, name: str, shape: Sequence[int], stored: str) -> Any:
    """Returns a tensor's type: F32 for vectors and routers, else `stored` or what its rows divide into."""
    types = gguf.GGMLQuantizationType
    if len(shape) == 1 or ROUTER in name:
        return types.F32
    for each in (stored, _IN_BLOCKS_OF_32.get(stored, "F16")):
        if shape[-1] % gguf.GGML_QUANT_SIZES[types[each]][0] == 0:
            return types[each]
    return types.F16


def add_setting(gguf: Any, writer: Any, key: str, value: Any) -> None:
    """Adds a setting with the type of its value."""
    # First, because a bool is an int in Python.
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tensors(gguf: Any, writer: Any, tensors: Sequence[Tensor], progress: Progress | None) -> None:
    """Writes the file, converting one tensor at a time."""
    # The header comes first and contains the sizes, so these are computed before any tensor is converted.
    sizes = {}
    for each in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[each.type]
        sizes[each.name] = int(np.prod(each.shape)) // block * block_bytes
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), sizes[each.name], each.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done_bytes, total_bytes = 0, sum(sizes.values())
    for each in tensors:
        values = np.ascontiguousarray(each.read(), np.float32)
        is_fitted = each.importance is not None or each.type.name in K_QUANTS
        writer.write_tensor_data(
            quantize(values, each.type.name, each.importance) if is_fitted else gguf.quants.quantize(values, each.type)
        )
        done_bytes += sizes[each.name]
        if progress is not None:
            progress(each.name, done_bytes, total_bytes)
    writer.close()
