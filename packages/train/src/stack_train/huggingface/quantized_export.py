"""Quantized models as checkpoints of compressed-tensors, GPTQ or AWQ, whose layouts their readers describe."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stack_core import ops
from stack_core.abi.errors import ConversionError
from stack_core.ops.building import is_quantized
from stack_train.huggingface.codes import fp4_pairs, pack_words
from stack_train.huggingface.gptq_export import UNIFORM, AwqScheme, GptqScheme, UniformScheme, common_scheme
from stack_train.models.weight_map import WeightRule, joined_tensors, shared_tensors
from stack_train.safetensors_files import TensorSpec

__all__ = ["LAYOUTS", "PlannedTensors", "quantized_tensors"]

# vLLM has kernels for 4-bit and 8-bit integers; narrower codes are stored in the next larger size.
_BITS = {f"int{bits}": 4 if bits <= 4 else 8 for bits in range(2, 9)}
_FLOATS = {"fp8_e4m3": 8, "mxfp4": 4, "nvfp4": 4}
_FP4_GROUPS = {"mxfp4": 32, "nvfp4": 16}
_INPUTS = {"int8": "int", "fp8_e4m3": "float"}
_F32, _I8, _U8 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.uint8)
_I32, _I64, _FP8 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class _Scheme:
    """How matrices are stored: an entry of `config_groups`.

    Attributes:
      type: quantized type of the codes, such as "int4".
      group: number of inputs that share a scale; None for one scale per output.
      symmetric: True without zero points.
      inputs: type of the inputs in products; None for floats.
    """

    type: str
    group: int | None
    symmetric: bool
    inputs: str | None

    @property
    def bits(self) -> int:
        return _BITS.get(self.type) or _FLOATS[self.type]

    @property
    def format(self) -> str:
        if self.type in _FP4_GROUPS:
            return f"{self.type}-pack-quantized"
        if self.type in _FLOATS:
            return "float-quantized"
        return "int-quantized" if self.bits == 8 and self.inputs else "pack-quantized"

    def section(self, targets: Sequence[str]) -> dict[str, Any]:
        strategy = {"strategy": "channel", "group_size": None}
        if self.group is not None:
            name = "tensor_group" if self.type == "nvfp4" else "group"
            strategy = {"strategy": name, "group_size": self.group}
        kind = "float" if self.type in _FLOATS else "int"
        weights = {"num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "dynamic": False, **strategy}
        inputs = None
        if self.inputs is not None:
            # The inputs of a product share their tiles with its weight.
            rows = (
                {"strategy": "token", "group_size": None} if self.group is None else {**strategy, "strategy": "group"}
            )
            inputs = {"num_bits": 8, "type": _INPUTS[self.inputs], "symmetric": True, "dynamic": True, **rows}
        return {
            "targets": list(targets),
            "format": self.format,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Returns the tensors of a matrix [d_out, d_in] in the order of `tensors`."""
        groups = (shape[0], 1 if self.group is None else shape[1] // self.group)
        module = name.removesuffix("weight")
        scale = TensorSpec(f"{module}weight_scale", {"mxfp4": _U8, "nvfp4": _FP8}.get(self.type, _F32), groups)
        if self.type in _FP4_GROUPS:
            unit = [TensorSpec(f"{module}weight_global_scale", _F32, (1,))] if self.type == "nvfp4" else []
            return [TensorSpec(f"{module}weight_packed", _U8, (shape[0], shape[1] // 2)), scale, *unit]
        if self.format != "pack-quantized":
            zeros = [] if self.symmetric else [TensorSpec(f"{module}weight_zero_point", _I8, groups)]
            return [TensorSpec(name, _FP8 if self.type in _FLOATS else _I8, shape), scale, *zeros]
        per_word = 32 // self.bits
        zeros = TensorSpec(f"{module}weight_zero_point", _I32, (-(-shape[0] // per_word), groups[1]))
        return [
            TensorSpec(f"{module}weight_packed", _I32, (shape[0], -(-shape[1] // per_word))),
            TensorSpec(f"{module}weight_shape", _I64, (2,)),
            scale,
            *([] if self.symmetric else [zeros]),
        ]

    def tensors(self, codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None) -> Iterator[np.ndarray]:
        """Yields the values of `specs` from codes [d_out, d_in], and scales and zero points [d_out, groups].

        Raises:
          ConversionError: scales of nvfp4 have several units.
        """
        if self.type == "nvfp4":
            # The largest scale is the largest number of float8_e4m3fn.
            unit = scale.max() / np.float32(ml_dtypes.finfo(_FP8).max)
            stored = (scale / unit).astype(_FP8)
            if not np.allclose(stored.astype(np.float32) * unit, scale, rtol=1e-5, atol=0):
                raise ConversionError(
                    "The scales of a matrix in nvfp4 have several units, and compressed-tensors has one for each "
                    "matrix. Quantize again by a rule, or keep the parameters that share the matrix in float."
                )
            yield fp4_pairs(codes)
            yield stored
            yield np.array([1 / unit], np.float32)
            return
        if self.format == "mxfp4-pack-quantized":
            yield fp4_pairs(codes)
            yield (np.frexp(scale)[1] + 126).astype(np.uint8)  # 2**e is 0.5 * 2**(e + 1) in `frexp`
            return
        if self.format != "pack-quantized":
            yield codes if self.type in _FLOATS else codes.astype(np.int8)
            yield scale
            if zero_point is not None:
                yield zero_point.astype(np.int8)
            return
        offset = 2 ** (self.bits - 1)
        yield pack_words(codes.astype(np.int16) + offset, self.bits)
        yield np.array(codes.shape, np.int64)
        yield scale
        if zero_point is not None:
            yield np.ascontiguousarray(pack_words(zero_point.astype(np.int16).T + offset, self.bits).T)


@dataclass(frozen=True)
class PlannedTensors:
    """The tensors of a checkpoint to write.

    Attributes:
      section: the `quantization_config`; empty if all tensors are floats.
      specs: names, dtypes and shapes of the tensors, in order.
      tensors: function that yields names and values in the order of `specs`.
      parameters: number of parameters.
    """

    section: Mapping[str, Any]
    specs: Sequence[TensorSpec]
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]
    parameters: int


LAYOUTS = ("compressed-tensors", *UNIFORM)
"""Layouts that are written; the first is the default."""

_AnyScheme = _Scheme | GptqScheme | AwqScheme
_Planned = tuple[Sequence[WeightRule], _AnyScheme | None, Mapping[str, tuple[int, ...]]]


def quantized_tensors(
    values: Mapping[str, Any],
    rules: Sequence[WeightRule],
    input_type: Callable[[str], str | None],
    dtype: Any,
    *,
    stored: str = "compressed-tensors",
) -> PlannedTensors:
    """Plans the tensors of a quantized model. Matrices of linear layers stay in codes, other parameters become floats.

    Args:
      values: parameters by path, some of them quantized.
      rules: locations of the parameters in the checkpoint.
      input_type: function of a path to the type of the inputs that a parameter multiplies; None for floats.
      dtype: dtype of the parameters that become floats.
      stored: layout of the codes, an entry of `LAYOUTS`.

    Raises:
      ConversionError: the layout cannot represent the codes of a parameter.
    """
    groups = shared_tensors(rules)
    schemes = [_scheme(group, [values[rule.parameter] for rule in group], input_type) for group in groups]
    shapes = [group[0].tensor_shapes(values[group[0].parameter].shape) for group in groups]
    of_group: Sequence[_AnyScheme | None] = _uniform(stored, schemes, shapes) if stored in UNIFORM else schemes
    if not any(of_group):
        raise ConversionError(
            f"No quantized parameter belongs to a linear layer that {stored} stores in codes. Convert the run that it "
            "was made from."
        )
    decoded = [
        rule.parameter
        for group, scheme in zip(groups, of_group, strict=True)
        for rule in group
        if scheme is None and is_quantized(values[rule.parameter])
    ]
    if decoded:
        reason = "only linear layers have codes in compressed-tensors"
        if stored in UNIFORM:
            reason = f"only layers of one number of bits and one group have codes in {stored.upper()}, in whole words"
        warnings.warn(f"Written as floats, because {reason}: {', '.join(decoded)}.", stacklevel=2)
    planned = list(zip(groups, of_group, shapes, strict=True))
    specs = [
        spec
        for group, scheme, named in planned
        for name, shape in named.items()
        for spec in (
            [TensorSpec(name, np.dtype(group[0].dtype or _float_dtype(values[group[0].parameter], dtype)), shape)]
            if scheme is None
            else scheme.specs(name, shape)
        )
    ]

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for group, scheme, _ in planned:
            arrays = [values[rule.parameter] for rule in group]
            if scheme is None:
                floats = [
                    np.asarray(ops.dequantize(array, dtype) if is_quantized(array) else array) for array in arrays
                ]
                yield from joined_tensors(group, floats).items()
                continue
            views = [array.__stack_qview__() for array in arrays]
            codes = joined_tensors(group, [np.asarray(view.qvalue) for view in views])
            scales = joined_tensors(group, [_per_output(view.scale, view.qvalue.shape) for view in views])
            has_zeros = views[0].zero_point is not None
            zeros = (
                joined_tensors(group, [_per_output(view.zero_point, view.qvalue.shape) for view in views])
                if has_zeros
                else {}
            )
            for name, matrix in codes.items():
                parts = scheme.tensors(matrix, scales[name], zeros.get(name))
                for spec, part in zip(scheme.specs(name, matrix.shape), parts, strict=True):
                    yield spec.name, part

    parameters = sum(int(np.prod(shape, dtype=np.int64)) for named in shapes for shape in named.values())
    return PlannedTensors(_section(planned), specs, tensors, parameters)


def _uniform(
    stored: str, schemes: Sequence[_Scheme | None], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> list[GptqScheme | AwqScheme | None]:
    """Returns the scheme of GPTQ or AWQ, or None for parameters that become floats.

    Raises:
      ConversionError: inputs are quantized, or codes are not integers.
    """
    kind = UNIFORM[stored]
    for scheme in filter(None, schemes):
        if scheme.inputs is not None or scheme.type not in _BITS:
            inputs = f" with {scheme.inputs} inputs" if scheme.inputs else ""
            raise ConversionError(
                f"{stored.upper()} stores integers and float inputs, unlike {scheme.type}{inputs}. Leave out --stored, "
                "which writes compressed-tensors, or quantize again, for example with --recipe w4_t128."
            )
    found = [
        (scheme.bits, scheme.group, scheme.symmetric)
        for scheme, named in zip(schemes, shapes, strict=True)
        if scheme is not None
        for name, shape in named.items()
        if kind(scheme.bits, scheme.group, scheme.symmetric).fits(name, shape)
    ]
    common = kind(*common_scheme(found)) if found else None
    return [
        common
        if common is not None
        and scheme is not None
        and (scheme.bits, scheme.group) == (common.bits, common.group)
        and all(common.fits(name, shape) for name, shape in named.items())
        else None
        for scheme, named in zip(schemes, shapes, strict=True)
    ]


def _scheme(
    group: Sequence[WeightRule], arrays: Sequence[Any], input_type: Callable[[str], str | None]
) -> _Scheme | None:
    """Returns the scheme of the tensors that parameters share, or None for tensors written as floats.

    Raises:
      ConversionError: compressed-tensors cannot represent the codes.
    """
    shapes = group[0].tensor_shapes(arrays[0].shape).values()
    # Most families of transformers do not use linear layers as routers, and no library quantizes routers.
    is_linear = all(rule.transposed and "router" not in rule.parameter for rule in group)
    if not is_linear or any(len(shape) != 2 for shape in shapes) or not all(map(is_quantized, arrays)):
        return None
    found = {
        _of_array(rule.parameter, array, input_type(rule.parameter)) for rule, array in zip(group, arrays, strict=True)
    }
    return found.pop() if len(found) == 1 else None


def _of_array(path: str, array: Any, inputs: str | None) -> _Scheme:
    view = array.__stack_qview__()
    kind = view.scheme.partition("/")[0]
    d_in, groups = view.qvalue.shape[-2], view.scale.shape[-2]
    if kind not in _BITS and kind not in _FLOATS:
        raise ConversionError(
            f"{path} is {view.scheme}, which `hf:` does not write. It writes int2 to int8, fp8_e4m3, mxfp4 and "
            "nvfp4, without scaled or rotated inputs. Quantize again, for example with --recipe w4_t128 or "
            "--algorithm nearest."
        )
    if 1 < groups == d_in:
        raise ConversionError(
            f"{path} is {view.scheme}, with a scale for each input, which `hf:` does not write. Quantize again with "
            "--algorithm nearest or gptq."
        )
    if inputs is not None and (inputs not in _INPUTS or (inputs == "int8") != (kind in _BITS)):
        raise ConversionError(
            f"{path} is {kind} and multiplies inputs in {inputs}. `hf:` writes int8 inputs of integers and fp8_e4m3 "
            "inputs of fp8_e4m3. Quantize again by such a recipe, or without activations."
        )
    # The groups of mxfp4 and nvfp4 are a part of the format, also if one covers all inputs.
    group = _FP4_GROUPS.get(kind, None if groups == 1 else d_in // groups)
    return _Scheme(kind, group, view.zero_point is None, inputs)


def _per_output(factor: Any, shape: Sequence[int]) -> np.ndarray:
    """Repeats scales or zero points over their tiles along all axes but the inputs."""
    full = np.asarray(factor)
    for axis in range(full.ndim):
        if axis != full.ndim - 2:
            full = np.repeat(full, shape[axis] // full.shape[axis], axis)
    return full


def _float_dtype(array: Any, dtype: Any) -> np.dtype[Any]:
    return np.dtype(dtype if is_quantized(array) else array.dtype)


def _section(planned: Sequence[_Planned]) -> dict[str, Any]:
    for _, scheme, _ in planned:
        if isinstance(scheme, UniformScheme):
            linear = [(named, other) for group, other, named in planned if group[0].transposed]
            return scheme.section(
                {name.removesuffix(".weight"): other is not None for named, other in linear for name in named}
            )
    return _groups([(group, scheme, named) for group, scheme, named in planned if isinstance(scheme, _Scheme | None)])


def _groups(planned: Sequence[tuple[Sequence[WeightRule], _Scheme | None, Mapping[str, Any]]]) -> dict[str, Any]:
    # The most common scheme targets all linear layers; the remaining schemes name their layers.
    counts = Counter(scheme for _, scheme, named in planned if scheme is not None for _ in named)
    common = counts.most_common(1)[0][0]
    targets: dict[_Scheme, list[str]] = {common: ["Linear"]}
    floats = list[str]()
    for group, scheme, named in planned:
        modules = [name.removesuffix(".weight") for name in named]
        if scheme is None:
            floats += modules if group[0].transposed else []
        elif scheme != common:
            targets.setdefault(scheme, []).extend(modules)
    written = {module for _, scheme, named in planned if scheme is not None for module in named}
    # A tied head is a linear layer without a tensor.
    ignored = sorted({*floats, *([] if "lm_head.weight" in written else ["lm_head"])})
    formats = {scheme.format for scheme in targets}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{n}": scheme.section(names) for n, (scheme, names) in enumerate(targets.items())},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
