"""How to quantize one array."""

from collections.abc import Mapping
from dataclasses import dataclass

from stack_core.errors import ArgumentError
from stack_quant.calibration import Calibration, calibration
from stack_quant.qtypes import QType, qtype
from stack_quant.tiling import Tiling, tiling

__all__ = ["ArraySpec"]


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
    """

    type: str = "int8"
    channel_axes: tuple[int, ...] = ()
    tiles: Mapping[int, int] | tuple[tuple[int, int], ...] = ()
    calibration: str = "absmax"
    symmetric: bool | None = None
    double_quantized: bool = False

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
