import pytest

from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_quant import ArraySpec


def test_specs_are_values() -> None:
    one, same = (ArraySpec(tiles={1: 4, 0: 2}), ArraySpec(tiles=((0, 2), (1, 4))))
    assert one == same and hash(one) == hash(same)


@pytest.mark.parametrize(
    ("spec", "scale_shape"),
    [
        (ArraySpec(), (1, 1, 1)),
        (ArraySpec(channel_axes=(0, -1)), (3, 1, 8)),
        (ArraySpec(channel_axes=(0, 2), tiles={1: 2}), (3, 2, 8)),
        (ArraySpec(tiles={1: 2, -1: 4}), (1, 2, 2)),
    ],
)
def test_scales_cover_tiles(spec: ArraySpec, scale_shape: tuple[int, ...]) -> None:
    assert spec.tiling((3, 4, 8)).scale_shape == scale_shape


def test_a_tile_that_does_not_divide_is_refused_with_both_sizes() -> None:
    with pytest.raises(ShapeError, match=r"mlp/up: a tile of 100 .* axis 0, of size 512\. .* 128, or pad .* to 600"):
        ArraySpec(tiles={0: 100}).tiling((512, 8), "mlp/up")
    with pytest.raises(ShapeError, match="a tile of 0"):
        ArraySpec(tiles={0: 0}).tiling((512, 8))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"type": "itn8"}, UnknownName, "Did you mean 'int8'"),
        ({"calibration": "absmx"}, UnknownName, "Did you mean 'absmax'"),
        ({"calibration": "rms"}, ArgumentError, "rms,factor"),
        ({"calibration": "percentile,101"}, ArgumentError, "out of range"),
        ({"calibration": "moving,1"}, ArgumentError, "out of range"),
        ({"calibration": "fixed,1,2"}, ArgumentError, "out of range"),
        ({"calibration": "rms,many"}, ArgumentError, "expected numbers"),
        ({"type": "fp8_e4m3", "calibration": "minmax"}, ArgumentError, "no zero point"),
        ({"type": "nf4", "symmetric": False}, ArgumentError, "no zero point"),
        ({"type": "mxfp4"}, ArgumentError, "each 32 .* no tiles"),
        ({"type": "nvfp4", "tiles": {0: 32}}, ArgumentError, "each 16 "),
        ({"double_quantized": True}, ArgumentError, "no tiles to share"),
        ({"type": "mxfp8", "tiles": {0: 32}, "double_quantized": True}, ArgumentError, "8 bits already"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ArraySpec(**settings)


def test_axes_that_are_none_or_twice() -> None:
    with pytest.raises(ArgumentError, match="axis 2 does not exist"):
        ArraySpec(channel_axes=(2,)).tiling((3, 4))
    with pytest.raises(ArgumentError, match="axis 1 is given twice"):
        ArraySpec(channel_axes=(-1,), tiles={1: 2}).tiling((3, 4))


def test_the_calibration_says_whether_there_is_a_zero_point() -> None:
    asymmetric = {
        name: not ArraySpec(calibration=name).symmetric for name in ("absmax", "minmax", "fixed,1", "fixed,-1,2")
    }
    assert asymmetric == {"absmax": False, "minmax": True, "fixed,1": False, "fixed,-1,2": True}
    assert ArraySpec(calibration="minmax", symmetric=True).symmetric
