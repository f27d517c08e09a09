"""Checkpoints of compressed-tensors, a format that llm-compressor writes and vLLM and transformers read.

A quantized linear layer has codes [d_out, d_in] and scales [d_out, groups] in torch's layout:

- int-quantized: `weight` is int8, `weight_scale` a float, and `weight_zero_point` int8 if the scheme is asymmetric.
- float-quantized: `weight` is float8_e4m3fn, `weight_scale` a float, for each matrix, output, group or block.
- pack-quantized: `weight_packed` is int32, packed along the inputs, with 2**(bits - 1) added to each code;
  `weight_zero_point` is packed in the same way along the outputs; `weight_shape` is [d_out, d_in].
- nvfp4-pack-quantized: `weight_packed` is uint8, with two 4-bit floats each; the scale of a group is `weight_scale`
  (float8_e4m3fn) divided by `weight_global_scale`.
- mxfp4-pack-quantized: `weight_packed` as in nvfp4; `weight_scale` is uint8, the exponent of a power of 2 plus 127.

Source: https://github.com/vllm-project/compressed-tensors, `compressors`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.blocks import BlockTensor, fp8_codes
from stack_train.huggingface.codes import (
    Codes,
    Coding,
    Form,
    QuantizedTensor,
    check_read,
    fp4_values,
    is_positive,
    problem_of,
    unpack_words,
)
from stack_train.models.reader import Reader
from stack_train.safetensors_files import StoredTensor

__all__ = ["FORMATS", "read_compressed_tensors"]

_FLOATS = ("F32", "BF16", "F16")
_PLACE = "quantization_config"
# Used in products of quantized activations and by quantized caches, which the weights do not depend on.
_ACTIVATION_SCALES = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")


@dataclass(frozen=True)
class _Scheme:
    """One entry of `config_groups`.

    Attributes:
      targets: "Linear", names of modules, or regular expressions that start with "re:".
      format: name of the layout, a key of `_LAYOUTS`.
      bits: size of a code.
      floating: True if codes are floats.
      symmetric: True without zero points.
      strategy: tiles that share a scale: tensor, channel, group, tensor_group or block.
      group: number of inputs of a group.
      block: size of a block (outputs, inputs) if the strategy is block, else None.
    """

    targets: Sequence[str]
    format: str
    bits: int
    floating: bool
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None

    def __str__(self) -> str:
        kind = f"{'fp' if self.floating else 'int'}{self.bits}"
        tiles = {"group": f", groups of {self.group}", "tensor_group": f", groups of {self.group}"}
        return f"{kind}{tiles.get(self.strategy, '')}"

    def scale_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Returns the accepted shapes of the scales of a matrix [d_out, d_in]; empty if the groups do not divide."""
        match self.strategy:
            case "tensor":
                return [(1,), (), (1, 1)]
            case "channel":
                return [(shape[0], 1)]
            case "block":
                assert self.block is not None, "`_scheme` checks it"
                return [(-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))]
            case _:
                return [] if not self.group or shape[1] % self.group else [(shape[0], shape[1] // self.group)]


def read_compressed_tensors(coding: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Coding:
    """Presents the matrices of a checkpoint of compressed-tensors as float tensors.

    Args:
      coding: the `quantization_config`.
      tensors: tensors of the checkpoint by name.

    Raises:
      ConversionError: a format or a setting is not supported, or a tensor is missing or does not fit; names each.
    """
    reader = Reader(coding)
    reader.get("quant_method", "version", "global_compression_ratio", "ignore", "run_compressed")
    format_, cache = reader.get("format"), reader.get("kv_cache_scheme")
    reader.expect("quantization_status", "compressed")
    groups = reader.get("config_groups") or {}
    check_read(reader, _PLACE)
    unapplied = [text for name, group in groups.items() for text in _unapplied(name, group)]
    if cache:
        unapplied.append(_description("kv_cache_scheme", cache, "keys and values in caches"))
    if format_ == "dense":
        return Coding(tensors, tuple(unapplied))
    schemes = [_scheme(name, group, format_) for name, group in groups.items()]
    found = dict(tensors)
    problems = list[str]()
    for module, codes in _modules(tensors).items():
        scheme = _scheme_of(module, schemes)
        if scheme is None:
            problems.append(f"{codes.name} holds codes, but no entry of config_groups targets {module}")
            continue
        del found[codes.name]
        parts = {name: found.pop(f"{module}.{name}", None) for name in _PARTS}
        result = _LAYOUTS[scheme.format](scheme, module, codes, parts)
        if isinstance(result, StoredTensor):
            found[f"{module}.weight"] = result
        else:
            problems += result
    if problems:
        raise ConversionError(
            f"The codes of {len(problems)} tensors are not those of {_PLACE} in config.json:\n  "
            + "\n  ".join(sorted(problems))
            + "\nDownload the checkpoint again, or convert the original float checkpoint."
        )
    # Scales without a section that prescribes their use; a model of another kind might own tensors of such names.
    if not unapplied and any(name.endswith(_ACTIVATION_SCALES) for name in found):
        unapplied.append("the stored scales of activations")
    unread = (*_ACTIVATION_SCALES, *(_CACHE_SCALES if cache else ()))
    return Coding({name: each for name, each in found.items() if not name.endswith(unread)}, tuple(unapplied))


def _unapplied(name: str, group: Any) -> list[str]:
    """Describes what an entry of `config_groups` prescribes for the inputs and outputs of products."""
    if not isinstance(group, Mapping):
        return []  # `_scheme` raises.
    kinds = {"input_activations": "inputs of products", "output_activations": "outputs of products"}
    return [
        _description(f"{key} of {name}", group[key], arrays)
        for key, arrays in kinds.items()
        if isinstance(group.get(key), Mapping)
    ]


def _description(place: str, scheme: Any, arrays: str) -> str:
    if not isinstance(scheme, Mapping):
        return f"{arrays} ({place})"
    kind = f"{'fp' if scheme.get('type') == 'float' else 'int'}{scheme.get('num_bits', 8)}"
    is_dynamic = {True: "dynamic", "local": "locally dynamic"}.get(scheme.get("dynamic", False), "static")
    return f"{kind} {arrays} ({place}: {', '.join(filter(None, (is_dynamic, scheme.get('strategy'))))})"


def _scheme(name: str, group: Any, format_: str | None) -> _Scheme:
    place = f"{_PLACE}.config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConversionError(f"{place} of config.json is {group!r}; expected an object with the object `weights`.")
    outer, inner = Reader(group), Reader(group["weights"])
    targets, format_ = tuple(outer.get("targets") or ()), outer.get("format") or format_
    outer.get("weights", "input_activations", "output_activations")
    if format_ not in _LAYOUTS:
        outer.problems.append(f"format={format_!r}, not {' or '.join(FORMATS)}")
    check_read(outer, place)
    # Calibration settings do not affect the decoding of stored codes. `actorder` shows in `weight_g_idx`.
    inner.get("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    inner.expect("dynamic", False)
    bits, kind = inner.get("num_bits", default=8), inner.get("type", default="int")
    symmetric, size = inner.get("symmetric", default=True), inner.get("group_size")
    strategy, block = inner.get("strategy"), inner.get("block_structure")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if "group" in strategy and not is_positive(size):
        inner.problems.append(f"group_size={size!r}, not a positive integer")
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and all(map(is_positive, block))):
        inner.problems.append(f"block_structure={block!r}, not [outputs, inputs]")
    choices = [(*each, tiles) for *each, strategies in _SUPPORTED[str(format_)] for tiles in strategies]
    if (kind, bits, strategy) not in choices:
        listed = ", ".join(f"{kind}{bits} by {tiles}" for kind, bits, tiles in choices)
        inner.problems.append(f"{kind}{bits} by {strategy}, which {format_} does not have: {listed}")
    check_read(inner, f"{place}.weights")
    block = (block[0], block[1]) if strategy == "block" else None
    return _Scheme(targets, str(format_), bits, kind == "float", symmetric, strategy, size, block)


def _scheme_of(module: str, schemes: Sequence[_Scheme]) -> _Scheme | None:
    """Returns the scheme of a module: names take precedence over expressions, and these over classes."""

    def rank(target: str) -> int | None:
        if target == module:
            return 0
        if target.startswith("re:"):
            try:
                return 1 if re.match(target.removeprefix("re:"), module) else None
            except re.error as error:
                raise ConversionError(f"{_PLACE}: {target!r} is not a regular expression: {error}.") from None
        return 2 if target == "Linear" else None

    ranked = [
        (found, number)
        for number, each in enumerate(schemes)
        for target in each.targets
        if (found := rank(target)) is not None
    ]
    return schemes[min(ranked)[1]] if ranked else None


def _modules(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the codes of each quantized module."""
    packed = {
        name.removesuffix(".weight_packed"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight_packed")
    }
    plain = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dtype in ("I8", "F8_E4M3")
    }
    return packed | plain


_PARTS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
_Parts = Mapping[str, StoredTensor | None]


def _plain(scheme: _Scheme, module: str, codes: StoredTensor, parts: _Parts) -> StoredTensor | list[str]:
    """Opens a matrix whose codes are its entries: int8 or float8_e4m3fn."""
    wanted = "F8_E4M3" if scheme.floating else "I8"
    if codes.dtype != wanted or len(codes.shape) != 2:
        return [f"{codes.name} is {codes.dtype}{list(codes.shape)}; expected {wanted}[d_out, d_in]"]
    shape = (codes.shape[0], codes.shape[1])
    problems, scale = _checked_scale(scheme, module, parts, shape, _FLOATS)
    zero, group_of = parts["weight_zero_point"], parts["weight_g_idx"]
    if scale is None or problems:
        return problems
    if not scheme.symmetric and (problem := problem_of(f"{module}.weight_zero_point", zero, ["I8"], scale.shape)):
        return [problem]
    if group_of is not None and (problem := problem_of(f"{module}.weight_g_idx", group_of, ["I32", "I64"], shape[1:])):
        return [problem]
    if scheme.block is not None:
        return BlockTensor(codes.path, codes.name, scale.dtype, shape, scale, scheme.block)

    def decode() -> Codes:
        values = fp8_codes(codes) if scheme.floating else codes.read()
        zeros = None if scheme.symmetric or zero is None else _matrix(zero.read())
        return Codes(values, _matrix(scale.read().astype(np.float32)), zeros, _groups(group_of, scale))

    form = None if group_of is not None else _form("float8_e4m3fn" if scheme.floating else "int8", scheme, scale)
    return QuantizedTensor(codes.path, codes.name, scale.dtype, shape, str(scheme), decode, form)


def _packed(scheme: _Scheme, module: str, codes: StoredTensor, parts: _Parts) -> StoredTensor | list[str]:
    """Opens a matrix of packed integers."""
    if problem := problem_of(f"{module}.weight_shape", parts["weight_shape"], ["I64", "I32"], (2,)):
        return [problem]
    assert parts["weight_shape"] is not None, "problem_of would have named it"
    shape = (int((sizes := parts["weight_shape"].read())[0]), int(sizes[1]))
    if problem := problem_of(codes.name, codes, ["I32"], (shape[0], -(-shape[1] * scheme.bits // 32))):
        return [problem]
    problems, scale = _checked_scale(scheme, module, parts, shape, _FLOATS)
    zero, group_of = parts["weight_zero_point"], parts["weight_g_idx"]
    if scale is None or problems:
        return problems
    groups = scale.shape[-1] if scale.shape else 1
    zero_shape = (-(-shape[0] * scheme.bits // 32), groups)
    if not scheme.symmetric and (problem := problem_of(f"{module}.weight_zero_point", zero, ["I32"], zero_shape)):
        return [problem]
    if group_of is not None and (problem := problem_of(f"{module}.weight_g_idx", group_of, ["I32", "I64"], shape[1:])):
        return [problem]
    offset = 2 ** (scheme.bits - 1)

    def decode() -> Codes:
        # Both offsets cancel, but the scheme defines signed codes.
        values = (unpack_words(codes.read(), scheme.bits, shape[1]) - np.uint8(offset)).view(np.int8)
        zeros = None
        if not scheme.symmetric and zero is not None:
            zeros = unpack_words(zero.read().T, scheme.bits, shape[0]).T.astype(np.int16) - offset
        return Codes(values, _matrix(scale.read().astype(np.float32)), zeros, _groups(group_of, scale))

    form = None if group_of is not None else _form("int8" if scheme.bits == 8 else "int4", scheme, scale)
    return QuantizedTensor(codes.path, f"{module}.weight", scale.dtype, shape, str(scheme), decode, form)


def _form(dtype: str, scheme: _Scheme, scale: StoredTensor) -> Form:
    return Form(dtype, scale.shape[-1] if len(scale.shape) == 2 else 1, has_zero_points=not scheme.symmetric)


def _four_bit_floats(scheme: _Scheme, module: str, codes: StoredTensor, parts: _Parts) -> StoredTensor | list[str]:
    """Opens a matrix in nvfp4 or mxfp4."""
    is_nvfp4 = scheme.format.startswith("nvfp4")
    size = 16 if is_nvfp4 else 32
    if codes.dtype != "U8" or len(codes.shape) != 2 or codes.shape[1] * 2 % size or scheme.group != size:
        return [
            f"{codes.name} is {codes.dtype}{list(codes.shape)} in groups of {scheme.group}; expected "
            f"U8[d_out, d_in / 2] in groups of {size}"
        ]
    shape = (codes.shape[0], codes.shape[1] * 2)
    problems, scale = _checked_scale(scheme, module, parts, shape, ["F8_E4M3"] if is_nvfp4 else ["U8"])
    unit = parts["weight_global_scale"]
    if scale is None or problems:
        return problems
    if is_nvfp4 and (problem := problem_of(f"{module}.weight_global_scale", unit, ["F32"], (1,))):
        return [problem]

    def decode() -> Codes:
        if is_nvfp4:
            assert unit is not None, "problem_of would have named it"
            factors = fp8_codes(scale).astype(np.float32) / unit.read()
        else:
            factors = np.ldexp(np.float32(1), scale.read().astype(np.int32) - 127)
        return Codes(fp4_values(codes.read()), factors)

    return QuantizedTensor(codes.path, f"{module}.weight", "BF16", shape, str(scheme), decode)


def _checked_scale(
    scheme: _Scheme, module: str, parts: _Parts, shape: tuple[int, int], dtypes: Sequence[str]
) -> tuple[list[str], StoredTensor | None]:
    name, scale, accepted = f"{module}.weight_scale", parts["weight_scale"], scheme.scale_shapes(shape)
    if not accepted:
        return [f"{module}.weight has {shape[1]} inputs, which group_size={scheme.group} does not divide"], None
    problem = problem_of(name, scale, dtypes, accepted[0])
    return ([] if scale is not None and scale.dtype in dtypes and scale.shape in accepted else [problem or ""]), scale


def _matrix(factor: np.ndarray) -> np.ndarray:
    return factor if factor.ndim == 2 else factor.reshape(1, 1)


def _groups(group_of: StoredTensor | None, scale: StoredTensor) -> np.ndarray | None:
    if group_of is None:
        return None
    groups, count = group_of.read(), scale.shape[-1]
    if groups.min() < 0 or groups.max() >= count:
        raise ConversionError(f"{group_of.name} names a group outside of the {count} groups of {scale.name}.")
    return groups


_LAYOUTS: Mapping[str, Callable[..., StoredTensor | list[str]]] = {
    "int-quantized": _plain,
    "float-quantized": _plain,
    "naive-quantized": _plain,
    "pack-quantized": _packed,
    "nvfp4-pack-quantized": _four_bit_floats,
    "mxfp4-pack-quantized": _four_bit_floats,
}
FORMATS = tuple(_LAYOUTS)
"""Formats of compressed-tensors that are read."""

_TILES = ("tensor", "channel", "group")
_INTEGERS, _FP8 = ("int", 8, _TILES), ("float", 8, (*_TILES, "block"))
_SUPPORTED: Mapping[str, Sequence[tuple[str, int, Sequence[str]]]] = {
    "int-quantized": (_INTEGERS,),
    "float-quantized": (_FP8,),
    "naive-quantized": (_INTEGERS, _FP8),
    "pack-quantized": tuple(("int", bits, ("channel", "group")) for bits in (2, 4, 8)),
    "nvfp4-pack-quantized": (("float", 4, ("tensor_group",)),),
    "mxfp4-pack-quantized": (("float", 4, ("group",)),),
}
