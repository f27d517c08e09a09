"""Parameters with low-rank adapters, and their rearrangements without merging."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.transform import views

__all__ = ["Adapted", "Adapter", "Factors"]

Factors = Mapping[str, Any]
"""Trainable arrays of one adapter: "down", "up" and, for DoRA, "magnitude"."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A parameter with an adapter: W' = W + s sum_r D_r U_r, or m W' / |W'| with magnitudes m (DoRA).

    Invariants, for a base with n axes: down and up have n + 1 axes, the last of which is the rank. Along each axis of
    the base they have either all entries or one. The magnitudes have n axes, with one entry along the axes over which
    |W'| sums.

    Attributes:
      base: W, an array or a quantized array.
      down, up: D and U.
      magnitude: m, or None.
      scale: s.
    """

    base: Any
    down: Any
    up: Any
    magnitude: Any
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def merged(self, dtype: Any) -> Any:
        """Computes W' as one array. |W'| is treated as a constant, as in section 4.3 of the DoRA paper."""
        base = ops.dequantize(self.base, jnp.float32) if is_quantized(self.base) else self.base
        down, up = (factor.astype(jnp.float32) for factor in (self.down, self.up))
        whole = base.astype(jnp.float32) + self.scale * jnp.einsum("...r,...r->...", down, up)
        if self.magnitude is not None:
            axes = tuple(axis for axis, size in enumerate(self.magnitude.shape) if size == 1)
            norm = jnp.sqrt(jnp.sum(jnp.square(whole), axes, keepdims=True))
            whole = whole * (self.magnitude.astype(jnp.float32) / lax.stop_gradient(norm))
        return whole.astype(dtype)

    def takes(self, contracted: Sequence[int], free: Sequence[int]) -> bool:
        """Returns whether a product that sums over `contracted` can be computed through the low-rank factors."""
        # D must not vary along kept axes, nor U along contracted ones: the product could not be split.
        lean = [(self.down, axis) for axis in free] + [(self.up, axis) for axis in contracted]
        return self.magnitude is None and all(factor.shape[axis] == 1 for factor, axis in lean)

    def full_along(self, axes: Sequence[int]) -> "Adapted":
        """Repeats scales and factors for each entry along `axes`, which can then be sliced or mapped over."""

        def full(array: Any) -> Any:
            shape = [self.shape[axis] if axis in axes else size for axis, size in enumerate(array.shape)]
            return jnp.broadcast_to(array, shape)

        base = views.full_along(views.view_of(self.base), axes) if is_quantized(self.base) else self.base
        return self._with(base, full)

    @staticmethod
    def joined(parts: "Sequence[Adapted]", axis: int) -> "Adapted | None":
        """Concatenates parameters with one entry along an axis; returns None if the kinds of adapters differ."""
        first = parts[0]
        # Views, because a parameter that was rearranged is a view already.
        bases = [views.view_of(part.base) if is_quantized(part.base) else part.base for part in parts]
        alike = all(
            part.scale == first.scale
            and jax.tree.structure(base) == jax.tree.structure(bases[0])
            and [leaf.shape for leaf in jax.tree.leaves(part)] == [leaf.shape for leaf in jax.tree.leaves(first)]
            for part, base in zip(parts, bases, strict=True)
        )
        # The caller merges the adapters instead.
        if not alike:
            return None
        factors = [dataclasses.replace(part, base=base) for part, base in zip(parts, bases, strict=True)]
        return jax.tree.map(lambda *leaves: lax.concatenate(leaves, axis), *factors)

    def transpose(self, permutation: Sequence[int]) -> "Adapted":
        """Transposes W', as `lax.transpose`."""

        def transposed(array: Any) -> Any:
            return array.transpose([*permutation, *range(len(permutation), array.ndim)])

        is_codes = is_quantized(self.base)
        base = views.transpose(self.base, permutation) if is_codes else self.base.transpose(permutation)
        return self._with(base, transposed)

    def reshape(self, shape: Sequence[int]) -> "Adapted | None":
        """Reshapes W' as `lax.reshape` does.

        Returns None if an axis of a factor would merge with an axis that the factor lacks.
        """
        # Axes of an empty array cannot be matched by their numbers of entries.
        if math.prod(self.shape) == 0:
            return None
        groups = views.axis_groups(self.shape, shape)
        factors = [self.down, self.up, *([] if self.magnitude is None else [self.magnitude])]
        for old, _ in groups:
            # Axes of one entry can join either kind.
            long = [axis for axis in old if self.shape[axis] > 1]
            if any(len({factor.shape[axis] > 1 for axis in long}) > 1 for factor in factors):
                return None

        def reshaped(array: Any) -> Any:
            sizes = [1] * len(shape)
            for old, new in groups:
                if any(array.shape[axis] > 1 for axis in old):
                    for axis in new:
                        sizes[axis] = shape[axis]
            return array.reshape(*sizes, *array.shape[len(self.shape) :])

        is_codes = is_quantized(self.base)
        base = views.reshape(views.view_of(self.base), shape) if is_codes else self.base.reshape(shape)
        return self._with(base, reshaped)

    def _with(self, base: Any, rearrange: Any) -> "Adapted":
        magnitude = None if self.magnitude is None else rearrange(self.magnitude)
        return Adapted(base, rearrange(self.down), rearrange(self.up), magnitude, self.scale)


@dataclass(frozen=True)
class Adapter:
    """The plan of the adapter of one parameter.

    Attributes:
      shape: shape of the parameter.
      lead: axes of the parameter with a separate adapter per entry, such as layers and experts.
      contracted: axes of the parameter over which products sum.
      rank: rank of the factors.
      scale: multiplier of the product of the factors.
      has_magnitude: True for an adapter with magnitudes (DoRA).
    """

    shape: tuple[int, ...]
    lead: tuple[int, ...]
    contracted: tuple[int, ...]
    rank: int
    scale: float
    has_magnitude: bool = False

    @property
    def free(self) -> tuple[int, ...]:
        """Axes of the parameter that products keep."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in {*self.lead, *self.contracted})

    @property
    def axes(self) -> dict[str, tuple[int | None, ...]]:
        """Axes of each factor, as the corresponding axes of the parameter; None is the rank."""
        found: dict[str, tuple[int | None, ...]] = {
            "down": (*self.lead, *self.contracted, None),
            "up": (*self.lead, None, *self.free),
        }
        return {**found, "magnitude": (*self.lead, *self.free)} if self.has_magnitude else found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes: down[*lead, *contracted, rank], up[*lead, rank, *free], magnitude[*lead, *free]."""
        return {
            name: tuple(self.rank if axis is None else self.shape[axis] for axis in axes)
            for name, axes in self.axes.items()
        }

    def initial(self, base: Any, key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """Creates factors that change nothing: down is uniform within 1 / sqrt(d_in), as in PEFT; up is zero."""
        shapes = self.shapes()
        limit = 1 / math.sqrt(math.prod(self.shape[axis] for axis in self.contracted))
        factors = {
            "down": jax.random.uniform(key, shapes["down"], dtype, -limit, limit),
            "up": jnp.zeros(shapes["up"], dtype),
        }
        if self.has_magnitude:
            whole = ops.dequantize(base, jnp.float32) if is_quantized(base) else base.astype(jnp.float32)
            norm = jnp.sqrt(jnp.sum(jnp.square(whole), self.contracted))
            factors["magnitude"] = self._ordered(norm, "magnitude").astype(dtype)
        return factors

    def adapted(self, base: Any, factors: Factors) -> Adapted:
        """Returns the parameter with factors of the shapes `shapes()`."""
        magnitude = self._spread(factors["magnitude"], "magnitude") if self.has_magnitude else None
        return Adapted(
            base, self._spread(factors["down"], "down"), self._spread(factors["up"], "up"), magnitude, self.scale
        )

    def _spread(self, factor: Any, name: str) -> Any:
        """Arranges a factor in the axes of the parameter, followed by the rank. Missing axes get one entry."""
        axes = self.axes[name]
        order = [*range(len(self.shape)), *([None] if None in axes else [])]
        present = [axis for axis in order if axis in axes]
        array = factor.transpose([axes.index(axis) for axis in present])
        return jnp.expand_dims(array, [place for place, axis in enumerate(order) if axis not in axes])

    def _ordered(self, norm: Any, name: str) -> Any:
        """Transposes an array with the kept axes from the order of the parameter to the order of the factor."""
        kept = sorted(axis for axis in self.axes[name] if axis is not None)
        return norm.transpose([kept.index(axis) for axis in self.axes[name] if axis is not None])
