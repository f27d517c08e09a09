"""Arrays that are stored quantized."""

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
    """A quantized array: a pytree whose leaves lead with the array's own leading axes, so that it stacks and slices.

    It stands for `(value - zero_point) * scale * scale_unit`, each repeated over what it covers; value is the code, or
    the entry of the type's codebook that the code indexes.

    Invariants, for the logical shape `shape`:

        planes[0].shape == shape
        shape[i] % scale.shape[i] == 0
        scale.shape[i] % scale_unit.shape[i] == 0
        zero_point.shape == scale.shape

    Attributes:
      planes: the codes; several arrays where `stack_quant.packing` cuts them.
      scale: float32; float8_e8m0fnu in mx types; float8_e4m3fn in nvfp4 and uint8 if double quantized.
      scale_unit: float32, what a scale of e4m3 or uint8 is a multiple of; else None.
      zero_point: int8, the code that stands for 0; None if that is 0.
      type: a name of `stack_quant.qtypes`.
      dtype: the name of the dtype that it stands for.
    """

    planes: tuple[Any, ...]  # JAX builds it of shapes, axes and shardings too
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
        """What all its leaves occupy, codes of less than a byte as they are stored."""
        return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(self))

    @property
    def codes(self) -> jax.Array:
        """The codes, unpacked, of dtype `qtype.code_dtype` and the logical shape."""
        return unpack(self.planes, self.qtype)

    @property
    def full_scale(self) -> jax.Array:
        """float32, of the shape of `scale`: the scale times its unit."""
        if self.scale.dtype == jnp.float32:
            return self.scale
        scale = lax.stop_gradient(self.scale).astype(jnp.float32)
        return scale if self.scale_unit is None else scale * spread(self.scale_unit, scale.shape)

    @property
    def scheme(self) -> str:
        """For messages: "int4/t128", the type and the tiles along axes that are cut."""
        pairs = zip(self.shape, self.scale.shape, strict=True)
        tiles = [f"{size // count}" for size, count in pairs if 1 < count < size]
        return "/t".join([self.type, "x".join(tiles)]) if tiles else self.type

    def __getitem__(self, index: Any) -> jax.Array:
        """Returns dequantized entries, so that a layer that reads its parameter as `kernel[...]` gets floats.

        An integer, or an array of integers, takes entries along the first axis and dequantizes no others.
        """
        if not _is_integer(index) or self.ndim == 0:
            return dequantize(self)[index]
        index = jnp.asarray(index)
        if jnp.iinfo(index.dtype).bits < 32:  # the number of rows may not fit
            index = index.astype(jnp.int32)
        index = jnp.where(index < 0, index + np.asarray(self.shape[0], index.dtype), index)
        return take(self, index, 0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the dequantized array for NumPy, always a copy."""
        if copy is False:  # NumPy's protocol asks for a ValueError
            raise ValueError("A quantized array is dequantized for NumPy, which makes a copy. Leave out copy=False.")
        return np.asarray(dequantize(self), dtype)

    __iter__: ClassVar[None] = None  # with `__getitem__` alone Python would count up for ever, as indices are clamped

    def __jax_array__(self) -> jax.Array:
        return dequantize(self)

    def __stack_qview__(self) -> QView:
        kind = self.qtype
        codebook = None if kind.codebook is None else jnp.asarray(kind.codebook, jnp.float32)
        return QView((1, 0), self.codes, self.full_scale, self.zero_point, self.scheme, codebook)


def _is_integer(index: Any) -> bool:
    if isinstance(index, bool):
        return False
    is_array = isinstance(index, jax.Array | np.ndarray | np.generic)
    return isinstance(index, int) or (is_array and jnp.issubdtype(index.dtype, jnp.integer))


def dequantize(array: QArray, dtype: DTypeLike | None = None) -> jax.Array:
    """What `array` stands for, as `dtype`, by default its own."""
    return ops.dequantize(array, array.dtype if dtype is None else dtype)
