"""The table of published timings advises on calls that were timed, and on calls near and far from them."""

import dataclasses
from typing import Any

import jax
import pytest

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_kernels.attention.tokamax import HeadTiles
from stack_kernels.ragged_dot.tokamax import GroupTiles
from stack_kernels.tuning.held_out import distance_of, ratios, tokamaxs_order
from stack_kernels.tuning.published import PUBLISHED, estimates, read
from stack_kernels.tuning.shapes import shape_of

H100, H200, V6E = (registries.chips[kind] for kind in ("h100", "h200", "v6e"))


def _implementation(op: str, name: str, priority: int, default: Any = None) -> OpImplementation:
    return OpImplementation(op, name, len, priority=priority, default=default and (lambda call, chip: default))


ATTENTION = {
    "tokamax": _implementation("attention", "tokamax", 2, HeadTiles(64, 64, 1, False)),
    "cudnn": _implementation("attention", "cudnn", 1),
    "reference": _implementation("attention", "reference", 0),
}
RAGGED = {
    "tokamax_v2": _implementation("ragged_dot", "tokamax_v2", 3, GroupTiles(0, 0, 0, 2)),
    "tokamax_v1": _implementation("ragged_dot", "tokamax_v1", 2, GroupTiles(128, 128, 128, 2)),
}


def _attention(seq: int = 512, *, dtype: str = "bfloat16", batch: int = 32, head_dim: int = 128) -> OpCall:
    array = jax.ShapeDtypeStruct((batch, seq, 16, head_dim), dtype)
    arrays = dict.fromkeys(("query", "key", "value"), array)
    arrays |= dict.fromkeys(("bias", "mask", "segment_ids", "kv_lengths", "sinks"))
    options = {"causal": True, "window": None, "softcap": None, "scale": 1.0, "return_lse": False, "query_offset": 0}
    return OpCall("attention", arrays, options)


def _ragged(rows: int, groups: int, d_in: int, d_out: int) -> OpCall:
    arrays = {
        "lhs": jax.ShapeDtypeStruct((rows, d_in), "bfloat16"),
        "rhs": jax.ShapeDtypeStruct((groups, d_in, d_out), "bfloat16"),
        "group_sizes": jax.ShapeDtypeStruct((groups,), "int32"),
        "bias": None,
    }
    return OpCall("ragged_dot", arrays, {})


def test_a_call_that_was_timed_gets_the_fastest_and_its_config() -> None:
    choice = PUBLISHED.lookup(_attention(), H100, candidates=ATTENTION)
    assert choice is not None
    of_call = next(case for case in read() if case.chip == "h100" and case.shape == shape_of(_attention()))
    both = {"cudnn": "jax_nn_dot_product_attention", "tokamax": "pallas_mosaic_gpu_flash_attention"}
    fastest = min(both, key=lambda name: of_call.times[both[name]][0])
    assert choice.implementation == fastest
    alone = PUBLISHED.lookup(_attention(), H100, candidates={"tokamax": ATTENTION["tokamax"]})
    assert alone is not None
    _, config = of_call.times["pallas_mosaic_gpu_flash_attention"]
    assert alone.config == HeadTiles(
        config["block_q"], config["block_kv"], config["num_stages"], bool(config["persistent"])
    )
    assert alone.reason.startswith("Tokamax 0.0.17 published ")
    assert " on h100; about " in alone.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_are_one(dtype: str) -> None:
    assert PUBLISHED.lookup(_attention(dtype=dtype), H100, candidates=ATTENTION) is not None


def test_another_chip_of_the_platform_is_said_to_be_like_it() -> None:
    choice = PUBLISHED.lookup(_attention(), H200, candidates=ATTENTION)
    assert choice is not None
    assert "on h100, like which h200 is taken to be; about" in choice.reason


def test_sizes_that_nobody_timed_are_estimated_from_the_nearest() -> None:
    choice = PUBLISHED.lookup(_ragged(3 * 8192, 64, 2048, 1408), V6E, candidates=RAGGED)
    assert choice is not None
    assert choice.implementation in RAGGED


def test_there_is_no_advice_where_what_is_preferred_was_not_timed() -> None:
    untimed = _implementation("attention", "ours", 5)
    assert PUBLISHED.lookup(_attention(), H100, candidates=ATTENTION | {"ours": untimed}) is None
    assert PUBLISHED.lookup(_attention(), H100, candidates={"reference": ATTENTION["reference"]}) is None
    assert PUBLISHED.lookup(_attention(), V6E, candidates=ATTENTION) is None
    windowed = dataclasses.replace(_attention(), options=_attention().options | {"window": (7, None)})
    assert PUBLISHED.lookup(windowed, H100, candidates=ATTENTION) is None


def test_there_is_no_advice_for_a_cpu() -> None:
    with_peaks = dataclasses.replace(H100, kind="cpu", model="Acme 9000")
    assert PUBLISHED.lookup(_attention(), with_peaks, candidates=ATTENTION) is None


def test_two_timings_of_an_implementation_are_too_few() -> None:
    shapes = [shape_of(_attention(seq)) for seq in (1024, 2048, 4096)]
    timed = {shape: {"often": (1e-3, None)} for shape in shapes}
    timed[shapes[0]]["seldom"] = timed[shapes[1]]["seldom"] = (1e-6, None)
    assert set(estimates(shape_of(_attention(3000)), timed, H100)) == {"often"}


def test_a_call_like_those_timed_falls_as_far_short_of_the_peaks() -> None:
    shapes = [shape_of(_attention(seq)) for seq in (4096, 8192, 16384)]  # which arithmetic bounds
    timed = {shape: {"half": (2 * shape.flops / H100.peak_flops["bfloat16"], None)} for shape in shapes}
    target = shape_of(_attention(6000))
    expected = 2 * target.flops / H100.peak_flops["bfloat16"]
    assert estimates(target, timed, H100)["half"].seconds == pytest.approx(expected, rel=1e-6)


def test_tokamax_tries_mosaic_first_then_triton_then_xla() -> None:
    gpu = ("ragged_dot", "triton_ragged_dot", "pallas_triton_ragged_dot", "pallas_mosaic_gpu_ragged_dot")
    for place in range(4):
        names = dict.fromkeys(gpu[: place + 1])
        expected = ("ragged_dot", "triton_ragged_dot", "triton_ragged_dot", "pallas_mosaic_gpu_ragged_dot")[place]
        assert tokamaxs_order(names) == expected
    assert tokamaxs_order(dict.fromkeys(("pallas_mosaic_tpu_v2_ragged_dot", "pallas_mosaic_tpu_ragged_dot"))) == (
        "pallas_mosaic_tpu_ragged_dot"
    )


def test_nine_calls_in_ten_of_models_that_were_held_out_get_what_is_within_5_percent_of_the_fastest() -> None:
    found = list(ratios(read()))
    ours, theirs = (distance_of(found, of) for of in (lambda each: each.chosen, lambda each: each.in_order))
    assert len({each.chip for each in found}) == 7
    assert ours.calls > 2000
    assert ours.within >= 0.90, ours
    assert theirs.within < 0.80, theirs
    assert ours.mean < 1.03, ours
