"""The specification by which one array is quantized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stack_core.abi.errors import ArgumentError, UnknownName, nearest
from stack_quant.calibration import Calibration, calibration
from stack_quant.qtypes import QType, qtype
from stack_quant.tiling import Tiling, tiling

__all__ = ["RANGE_ENDS", "ArraySpec", "check_range_ends", "range_ends_at_run_time"]

RANGE_ENDS: Final = {
    "fitted": "exact or half_step, whichever has the smaller squared error, tile by tile; a given range is exact",
    "exact": "on the outermost codes, so that the largest magnitude, constants, masks and one-hot rows stay exact",
    "half_step": "half a step beyond the outermost codes, to which they still round; a finer step, as in Qwix",
}
"""Mappings of the ends of a range onto integers: for int8, onto 127 or onto 127.5.

On Gaussian weights "half_step" has the smaller error, by 6% in int4 and 0.1% in int8, but it changes the values of
constants, masks and ternary weights.
"""


def check_range_ends(name: str, types: Sequence[str]) -> None:
    """Raises an error unless `name` is a key of `RANGE_ENDS` and applies to at least one type."""
    if name not in RANGE_ENDS:
        known = "; ".join(f"{known}: {text}" for known, text in RANGE_ENDS.items())
        raise UnknownName(f"Unknown range_ends {name!r}.{nearest(name, RANGE_ENDS)} There are: {known}.")
    if name != "fitted" and not any(qtype(kind).is_integer for kind in types):
        given = " and ".join(types) or "no type"
        raise ArgumentError(
            f"range_ends={name!r} is for integers, whose codes are evenly spaced; given {given}. Leave it out."
        )


def range_ends_at_run_time(name: str, kind: str) -> str:
    """Returns the `range_ends` of arrays that are quantized at each call.

    Fitting takes three times as long as plain rounding (2.3 against 0.7 CPU-ms for 2**20 entries). It lowers the error
    by 7% in 4 bits but by less than 1% in 8 bits, where "fitted" therefore becomes "exact".
    """
    if not qtype(kind).is_integer:
        return "fitted"  # The setting only affects integer types.
    return "exact" if name == "fitted" and qtype(kind).bits == 8 else name


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Specification of the quantization of one array: a hashable value, validated on creation.

        ArraySpec(type="int8", channel_axes=(1,))                        # weight[d_in, d_out], a scale for each column
        ArraySpec(type="int4", channel_axes=(0, 2), tiles={1: 128})      # [layers, d_in, d_out], tiles along d_in

    Attributes:
      type: name of the quantized type, from `stack_quant.qtypes`.
      channel_axes: axes with a separate scale for every entry; negative axes count from the end.
      tiles: number of entries that share a scale, by axis. Along an axis in neither field, all entries share a scale.
      calibration: method of finding the range: a name in `stack_quant.calibration` and its arguments, such as "rms,7".
      symmetric: True centres the range on zero; False gives codes a zero point. None follows the calibration:
        "minmax" and an off-centre "fixed" range get a zero point.
      double_quantized: store float32 scales in 8 bits, as multiples of a unit that the tiles of a channel share.
      range_ends: position of the ends of the range among integer codes, a key of `RANGE_ENDS`. Other types map the
        ends onto their outermost codes.
      shared_unit_axes: axes along which scales that have a unit share it, in addition to the axes of the tiles.
    """

    type: str = "int8"
    channel_axes: tuple[int, ...] = ()
    tiles: Mapping[int, int] | tuple[tuple[int, int], ...] = ()
    calibration: str = "absmax"
    symmetric: bool | None = None
    double_quantized: bool = False
    range_ends: str = "fitted"
    shared_unit_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Specs are static arguments of `jit`: equal ones must be hashable and compare equal in any order of tiles.
        object.__setattr__(self, "tiles", tuple(sorted(dict(self.tiles).items())))
        kind = self.qtype
        asymmetric = self.calibrated.asymmetric if self.symmetric is None else not self.symmetric
        if asymmetric and not kind.is_integer:
            raise ArgumentError(
                f"{kind.name} has no zero point, which {self.calibration!r} or symmetric=False requires. "
                "Use a symmetric calibration, such as 'absmax', or an integer type."
            )
        object.__setattr__(self, "symmetric", not asymmetric)
        self._check_block(kind)
        check_range_ends(self.range_ends, [self.type])
        if self.double_quantized and (not self.tiles or kind.scale_dtype != "float32"):
            reason = (
                "there are no tiles to share a unit" if not self.tiles else "the type's scales are of 8 bits already"
            )
            raise ArgumentError(f"{kind.name}, double_quantized=True: {reason}. Leave it out.")

    @property
    def qtype(self) -> QType:
        """The type that `type` names."""
        return qtype(self.type)

    @property
    def tile_sizes(self) -> dict[int, int]:
        """`tiles` as a mapping."""
        return dict(self.tiles)

    @property
    def calibrated(self) -> Calibration:
        """The calibration that `calibration` names."""
        return calibration(self.calibration)

    def tiling(self, shape: tuple[int, ...], name: str = "") -> Tiling:
        """Returns the tiles of an array of that shape; raises as `stack_quant.tiling.tiling`."""
        return tiling(shape, self.channel_axes, self.tile_sizes, name)

    def unit_axes(self, ndim: int) -> tuple[int, ...]:
        """Returns the axes along which tiles share the unit of their scales, if scales have one."""
        return tuple(axis % ndim for axis in (*self.tile_sizes, *self.shared_unit_axes))

    def _check_block(self, kind: QType) -> None:
        if kind.block_size is None:
            return
        sizes = list(self.tile_sizes.values())
        if sizes != [kind.block_size]:
            given = f"tiles={self.tile_sizes}" if sizes else "no tiles"
            raise ArgumentError(
                f"{kind.name} has a scale for each {kind.block_size} entries of one axis; given {given}. "
                f"Give tiles={{axis: {kind.block_size}}}, and the other axes as channel_axes."
            )
