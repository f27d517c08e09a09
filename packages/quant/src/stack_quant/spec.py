"""How to quantize one array."""

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
    "exact": "on the outermost codes: the largest magnitude, and with it constants, masks and one-hot rows, stay exact",
    "half_step": "half a step beyond, from where they round to the outermost codes: a finer step, Qwix's convention",
}
"""How integers may map the ends of a range, for int8 onto 127 or onto 127.5.

On Gaussian weights "half_step" has the smaller error, by 6% in int4 and 0.1% in int8, but no constant, mask or ternary
weight survives it.
"""


def check_range_ends(name: str, types: Sequence[str]) -> None:
    """Raises an error unless `name` is one of `RANGE_ENDS` that acts on one of the types."""
    if name not in RANGE_ENDS:
        known = "; ".join(f"{known}: {text}" for known, text in RANGE_ENDS.items())
        raise UnknownName(f"Unknown range_ends {name!r}.{nearest(name, RANGE_ENDS)} There are: {known}.")
    if name != "fitted" and not any(qtype(kind).is_integer for kind in types):
        given = " and ".join(types) or "no type"
        raise ArgumentError(
            f"range_ends={name!r} is for integers, whose codes are evenly spaced; given {given}. Leave it out."
        )


def range_ends_at_run_time(name: str, kind: str) -> str:
    """The choice for arrays that are quantized at each call.

    Fitting takes three times as long as rounding alone (2.3 against 0.7 CPU-ms for 2**20 entries). In 8 bits it lowers
    the error by less than 1%, so that "fitted" is "exact" there; in 4 bits by 7%.
    """
    if not qtype(kind).is_integer:
        return "fitted"  # which leaves other types alone
    return "exact" if name == "fitted" and qtype(kind).bits == 8 else name


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """How to quantize one array: a hashable value, checked when it is made.

        ArraySpec(type="int8", channel_axes=(1,))                        # weight[d_in, d_out], a scale for each column
        ArraySpec(type="int4", channel_axes=(0, 2), tiles={1: 128})      # [layers, d_in, d_out], tiles along d_in

    Attributes:
      type: a name of `stack_quant.qtypes`.
      channel_axes: those along which every entry has a scale of its own; negative ones count from the end.
      tiles: by axis, how many entries share a scale. Axes in neither share theirs over all they have.
      calibration: how the range is found, a name of `stack_quant.calibration` and its arguments: "rms,7".
      symmetric: around zero, or with a zero point; None leaves it to the calibration: "minmax" and a "fixed" range that
        is not centred have a zero point.
      double_quantized: float32 scales are stored in 8 bits, in units of one that the tiles of a channel share.
      range_ends: where integers put the ends of a range, of `RANGE_ENDS`. Other types have codes there.
    """

    type: str = "int8"
    channel_axes: tuple[int, ...] = ()
    tiles: Mapping[int, int] | tuple[tuple[int, int], ...] = ()
    calibration: str = "absmax"
    symmetric: bool | None = None
    double_quantized: bool = False
    range_ends: str = "fitted"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", tuple(sorted(dict(self.tiles).items())))
        kind = self.qtype
        asymmetric = self.calibrated.asymmetric if self.symmetric is None else not self.symmetric
        if asymmetric and not kind.is_integer:
            raise ArgumentError(
                f"{kind.name} has no zero point, which {self.calibration!r} or symmetric=False asks for. "
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
        """The tiles of an array of that shape; raises as `stack_quant.tiling.tiling` does."""
        return tiling(shape, self.channel_axes, self.tile_sizes, name)

    def unit_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes along which the tiles of a channel share the unit of their scales, where scales have one."""
        return tuple(axis % ndim for axis in self.tile_sizes)

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
