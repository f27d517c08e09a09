"""Choice of implementations by published timings, for chips without local measurements.

The estimate for a call is the time at the chip's peaks, times the shortfall of the implementation where it was timed:
the geometric mean over the nearest timings of the same kind of call, weighted by proximity. An implementation with
fewer than three timings of a kind is not a candidate. `benchmarks/chooser_vs_tokamax.py` measures the quality of this
choice and the error of its seconds; docs/accelerators.md has the figures.

Measurements of `stack tune` take precedence: their table is consulted first.
"""

import functools
import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.ops import OpCall, OpImplementation, TunedChoice
from stack_core.abi.plugins import registries
from stack_core.chips import Chip
from stack_core.ops.building import preferred
from stack_kernels.tuning.lookup import duration, nearest_chip
from stack_kernels.tuning.shapes import CallShape, shape_of
from stack_kernels.tuning.tables import ChipName, decoded_config

__all__ = ["PUBLISHED", "Estimate", "Published", "Timed", "estimates", "read"]

PATH = Path(__file__).parents[1] / "published" / "tokamax.json.gz"
_NEAREST = 8
_MIN_TIMINGS = 3
_SPREAD = 0.3  # a timing at this distance has a quarter of the weight of one at distance 0
_MIN_S = 1e-6


@dataclass(frozen=True)
class Timed:
    """A call with published timings.

    Attributes:
      chip: name of the chip.
      shape: the call's kind and sizes.
      direction: "forward", "backward", or "of lhs" and "of rhs" for ragged products, whose gradients are timed
        separately.
      times: seconds and config (in JSON form) by the publisher's name of the implementation.
    """

    chip: str
    shape: CallShape
    direction: str
    times: Mapping[str, tuple[float, Any]]


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of an implementation, with its nearest timing."""

    seconds: float
    timed_s: float
    config: Any
    shape: CallShape


def read(path: Path = PATH) -> tuple[Timed, ...]:
    """Reads the timings from a file written by `benchmarks/tokamax_timings.py`."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    return tuple(_timed(case) for case in content["cases"])


def _timed(case: Mapping[str, Any]) -> Timed:
    traits, sizes = (tuple(sorted(case[part].items())) for part in ("traits", "sizes"))
    shape = CallShape(case["op"], traits, sizes, case["flops"], case["bytes"])
    return Timed(case["chip"], shape, case["direction"], {name: (s, config) for name, s, config in case["times"]})


def estimates(
    shape: CallShape, timed: Mapping[CallShape, Mapping[str, tuple[float, Any]]], chip: Chip
) -> dict[str, Estimate]:
    """Estimates the time of a call with each implementation from timings on one chip in one direction."""
    distances = [(other.distance(shape), other) for other in timed]
    near = sorted(((far, other) for far, other in distances if far < math.inf), key=lambda pair: pair[0])
    found: dict[str, Estimate] = {}
    for name in {name for _, other in near for name in timed[other]}:
        of_one = [(far, other, *timed[other][name]) for far, other in near if name in timed[other]]
        if len(of_one) < _MIN_TIMINGS:
            continue
        short = [
            (1 / (far + _SPREAD) ** 2, math.log(s / _bound_s(other, chip))) for far, other, s, _ in of_one[:_NEAREST]
        ]
        shortfall = sum(weight * log for weight, log in short) / sum(weight for weight, _ in short)
        _, nearest, timed_s, config = of_one[0]
        found[name] = Estimate(_bound_s(shape, chip) * math.exp(shortfall), timed_s, config, nearest)
    return found


def _bound_s(shape: CallShape, chip: Chip) -> float:
    """Returns the time at the chip's peaks for bfloat16 products, at least one microsecond."""
    peak, bandwidth = chip.peak_flops["bfloat16"], chip.hbm_bandwidth_bytes_s
    assert bandwidth is not None, f"the bandwidth of {chip.kind} is known"
    return max(shape.flops / peak, shape.traffic_bytes / bandwidth, _MIN_S)


class Published:
    """A `TunedTable` of published timings.

    Args:
      source: name of the publisher.
      path: file with the timings.
      implementations: our implementation and a converter of configs, by op and the publisher's name.
    """

    def __init__(self, source: str, path: Path, implementations: Mapping[tuple[str, str], tuple[str, Any]]) -> None:
        self._source, self._path, self._implementations = source, path, implementations

    def lookup(
        self,
        call: OpCall,
        chip: Chip,
        *,
        candidates: Mapping[str, OpImplementation],
        forward: TunedChoice | None = None,
    ) -> TunedChoice | None:
        """Chooses an implementation for one direction of a call; see `stack_core.abi.tuning.TunedTable`."""
        del forward  # gradients were timed separately
        # A chip without known peaks cannot be compared with the timed chips, whose timings take 0.1 seconds to read.
        near = nearest_chip(ChipName.of(chip), self._by_chip) if candidates and _is_accelerator(chip) else None
        if near is None:
            return None
        found = {name: each for name, each in self._estimates(call, near).items() if name in candidates}
        if not found or any(name not in found for name in preferred(candidates)):
            return None  # an untimed implementation may be faster than all timed ones
        best = min(found, key=lambda name: found[name].seconds)
        default = candidates[best].default
        return TunedChoice(
            best, self._config(found[best], default and default(call, chip)), self._reason(found[best], near, chip)
        )

    @functools.cached_property
    def _by_chip(self) -> dict[ChipName, dict[tuple[str, str], dict[CallShape, Mapping[str, tuple[float, Any]]]]]:
        found: dict[ChipName, dict[tuple[str, str], dict[CallShape, Mapping[str, tuple[float, Any]]]]] = {}
        for case in sorted(read(self._path), key=lambda case: "bfloat16" in str(case.shape.traits)):  # these stay
            of_chip = found.setdefault(ChipName.of(registries.chips[case.chip]), {})
            of_chip.setdefault((case.shape.op, case.direction), {})[_plain(case.shape)] = case.times
        return found

    def _estimates(self, call: OpCall, chip: ChipName) -> dict[str, Estimate]:
        timed = self._by_chip[chip].get((call.op, call.direction), {})
        found = estimates(_plain(shape_of(call)), timed, registries.chips[chip.kind])
        names = {
            their_name: implementation
            for (op, their_name), (implementation, _) in self._implementations.items()
            if op == call.op
        }
        translated = {their_name: self._implementations[call.op, their_name][1] for their_name in names}
        return {
            names[their_name]: Estimate(each.seconds, each.timed_s, translated[their_name](each.config), each.shape)
            for their_name, each in found.items()
            if their_name in names
        }

    def _config(self, found: Estimate, default: Any) -> Any:
        try:
            return decoded_config(found.config, default)
        except ValueError:
            return None

    def _reason(self, found: Estimate, near: ChipName, chip: Chip) -> str:
        where = near.kind if near.kind == chip.kind else f"{near.kind}, like which {chip.kind} is taken to be"
        return (
            f"{self._source} published {duration(found.timed_s)} at {found.shape} on {where}; "
            f"about {duration(found.seconds)} here"
        )


def _is_accelerator(chip: Chip) -> bool:
    return chip.kind != "cpu" and "bfloat16" in chip.peak_flops and chip.hbm_bandwidth_bytes_s is not None


def _plain(shape: CallShape) -> CallShape:
    """Treats float16 as bfloat16, whose products take as long."""
    # In two steps, because "bfloat16" contains "float16".
    traits = tuple(
        (name, value.replace("bfloat16", "float16").replace("float16", "bfloat16")) for name, value in shape.traits
    )
    return CallShape(shape.op, traits, shape.sizes, shape.flops, shape.traffic_bytes)


def _heads(config: Mapping[str, Any]) -> Any:
    """Converts a config of Tokamax's attention; None for split keys and folded heads, which ours does not have."""
    if config.get("split_k", 1) != 1 or config.get("fold_q_sequence_heads", False) or "block_q" not in config:
        return None
    return {
        "queries": config["block_q"],
        "keys": config["block_kv"],
        "stages": config["num_stages"],
        "persistent": bool(config.get("persistent", False)),
    }


def _groups(config: Mapping[str, Any]) -> Any:
    if "tile_m" in config:
        sizes = [config[f"tile_{axis}"] or 0 for axis in ("m", "k", "n")]
        return dict(zip(("rows", "d_in", "d_out"), sizes, strict=True)) | {
            "stages": config.get("input_buffer_count", 2)
        }
    if config["split_k"] != 1:
        return None
    found = {
        "rows": config["block_m"],
        "d_in": config["block_k"],
        "d_out": config["block_n"],
        "stages": config["num_stages"],
    }
    return found | ({"warps": config["num_warps"]} if "num_warps" in config else {})


def _norms(config: Mapping[str, Any]) -> Any:
    return {"rows": config["block_m"], "columns": config["block_n"] or 1, "warps": config["num_warps"]}


def _none(config: Any) -> None:
    return None


# Without the gated unit: its weights were one array when it was timed, whereas our adapter copies two into one per
# call.
_TOKAMAX: Mapping[tuple[str, str], tuple[str, Any]] = {
    ("attention", "pallas_mosaic_gpu_flash_attention"): ("tokamax", _heads),
    ("attention", "jax_nn_dot_product_attention"): ("cudnn", _none),
    ("norm", "normalization"): ("reference", _none),
    ("norm", "triton_normalization"): ("tokamax_triton", _norms),
    ("ragged_dot", "pallas_mosaic_gpu_ragged_dot"): ("tokamax_mosaic_gpu", _groups),
    ("ragged_dot", "triton_ragged_dot"): ("tokamax_triton", _groups),
    ("ragged_dot", "pallas_mosaic_tpu_ragged_dot"): ("tokamax_v1", _groups),
    ("ragged_dot", "pallas_mosaic_tpu_v2_ragged_dot"): ("tokamax_v2", _groups),
}
PUBLISHED = Published("Tokamax 0.0.17", PATH, _TOKAMAX)
"""Timings in Tokamax's wheel (Apache-2.0, see published/NOTICE), registered by this package."""
