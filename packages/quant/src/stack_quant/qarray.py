"""Quantized arrays."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from stack_core import ops
from stack_core.abi.ops import QView
from stack_core.ops.building import take
from stack_quant.packing import stored_bytes, unpack
from stack_quant.qtypes import QType, qtype
from stack_quant.tiling import spread

__all__ = ["QArray", "dequantize"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """A quantized array: a pytree that stacks and slices like an array, because its leaves share the leading axes.

    Its dequantized value is `(value - zero_point) * scale * scale_unit`, with each factor repeated over its tile. Here
    value is the code, or the entry of the type's codebook at the code.

    Invariants, for the logical shape `shape`:

        planes[0].shape == shape
        shape[i] % scale.shape[i] == 0
        scale.shape[i] % scale_unit.shape[i] == 0
        zero_point.shape == scale.shape

    Attributes:
      planes: the codes, as several arrays if `stack_quant.packing` splits the bits of a code.
      scale: scale of each tile: float32; float8_e8m0fnu in mx types, float8_e4m3fn in nvfp4, uint8 if double quantized.
      scale_unit: float32 unit of float8_e4m3fn and uint8 scales; else None.
      zero_point: int8 code of the value 0; None in symmetric arrays.
      type: name of the quantized type, from `stack_quant.qtypes`.
      dtype: name of the dtype of the dequantized array.
    """

    planes: tuple[Any, ...]  # Any, as JAX also builds this pytree from shapes, axes and shardings
    scale: Any
    scale_unit: Any
    zero_point: Any
    type: str = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def qtype(self) -> QType:
        """The type that `type` names."""
        return qtype(self.type)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.planes[0].shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.planes[0].size

    @property
    def nbytes(self) -> int:
        """Size of all leaves in bytes, with codes of less than a byte in packed form."""
        return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(self))

    @property
    def codes(self) -> jax.Array:
        """The unpacked codes, of dtype `qtype.code_dtype` and the logical shape."""
        return unpack(self.planes, self.qtype)

    @property
    def full_scale(self) -> jax.Array:
        """The scale times its unit: float32, of the shape of `scale`."""
        if self.scale.dtype == jnp.float32:
            return self.scale
        scale = lax.stop_gradient(self.scale).astype(jnp.float32)
        return scale if self.scale_unit is None else scale * spread(self.scale_unit, scale.shape)

    @property
    def scheme(self) -> str:
        """Description for messages, such as "int4/t128": the type and the tile sizes."""
        pairs = zip(self.shape, self.scale.shape, strict=True)
        tiles = [f"{size // count}" for size, count in pairs if 1 < count < size]
        return "/t".join([self.type, "x".join(tiles)]) if tiles else self.type

    def __getitem__(self, index: Any) -> jax.Array:
        """Returns dequantized entries; layers that read their parameter as `kernel[...]` thus get floats.

        An integer, or an array of integers, selects entries along the first axis and dequantizes only these.
        """
        if not _is_integer(index) or self.ndim == 0:
            return dequantize(self)[index]
        index = jnp.asarray(index)
        if jnp.iinfo(index.dtype).bits < 32:  # the number of rows, which is added below, may exceed a small dtype
            index = index.astype(jnp.int32)
        index = jnp.where(index < 0, index + np.asarray(self.shape[0], index.dtype), index)
        return take(self, index, 0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the dequantized array for NumPy, always a copy."""
        if copy is False:  # NumPy's protocol requires a ValueError
            raise ValueError("A quantized array is dequantized for NumPy, which makes a copy. Leave out copy=False.")
        return np.asarray(dequantize(self), dtype)

    # Without `__iter__` Python would iterate by `__getitem__` and never stop, as indices out of range are clamped.
    __iter__: ClassVar[None] = None

    def __jax_array__(self) -> jax.Array:
        return dequantize(self)

    def __stack_qview__(self) -> QView:
        kind = self.qtype
        codebook = None if kind.codebook is None else jnp.asarray(kind.codebook, jnp.float32)
        return QView((1, 0), self.codes, self.full_scale, self.zero_point, self.scheme, codebook)


def _is_integer(index: Any) -> bool:
    # In NumPy, True is a mask and not the index 1.
    if isinstance(index, bool):
        return False
    is_array = isinstance(index, jax.Array | np.ndarray | np.generic)
    return isinstance(index, int) or (is_array and jnp.issubdtype(index.dtype, jnp.integer))


def dequantize(array: QArray, dtype: DTypeLike | None = None) -> jax.Array:
    """Dequantizes `array` to `dtype`, by default to `array.dtype`."""
    return ops.dequantize(array, array.dtype if dtype is None else dtype)
