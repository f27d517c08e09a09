"""Makes what stack-kernels ships of Tokamax's published timings: calls of our ops, with the best of each kernel.

    pip download --no-deps --python-version 3.12 --only-binary=:all: tokamax==0.0.17 && unzip tokamax-*.whl -d WHEEL
    python benchmarks/tokamax_timings.py WHEEL

Left out: what is no op of ours, quantized operands, dropout, pages, masks that are arrays, and products with an
activation. Gradients of ragged products to the rows and to the matrices were timed apart, and stay apart.
"""

import collections
import gzip
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.ops import OpCall
from stack_kernels.tuning.published import PATH
from stack_kernels.tuning.shapes import shape_of

CHIPS = {
    "nvidia_a100-sxm4-40gb": "a100-40gb",
    "nvidia_b200": "b200",
    "nvidia_h100_80gb_hbm3": "h100",
    "tpu7x": "v7x",
    "tpu_v5": "v5p",
    "tpu_v5_lite": "v5e",
    "tpu_v6_lite": "v6e",
}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32"}
RAGGED = {"[[1], [1]]": "forward", "[[1], [2]]": "of lhs", "[[0], [0]]": "of rhs"}


def main(wheel: Path) -> None:
    cases: dict[Any, dict[str, tuple[float, Any]]] = collections.defaultdict(dict)
    for file in sorted(wheel.glob("tokamax/data/autotuning/*/*.json")):
        if (chip := CHIPS.get(file.parent.name)) is not None:
            for key, found in json.loads(file.read_text()).items():
                for direction, call, seconds, config in timed(json.loads(key), found or {}):
                    times = cases[chip, direction, shape_of(call)]
                    name = file.stem.removesuffix("_vjp")
                    if name not in times or seconds < times[name][0]:
                        times[name] = (seconds, config)
    content = {
        "source": "Tokamax 0.0.17, https://github.com/openxla/tokamax",
        "license": "Apache-2.0",
        "cases": [
            {
                "chip": chip,
                "op": shape.op,
                "direction": direction,
                "traits": dict(shape.traits),
                "sizes": dict(shape.sizes),
                "flops": shape.flops,
                "bytes": shape.traffic_bytes,
                "times": [[name, float(f"{seconds:.4g}"), config] for name, (seconds, config) in sorted(times.items())],
            }
            for (chip, direction, shape), times in cases.items()
        ],
    }
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(cases)} calls, {sum(map(len, cases.values()))} timings, {PATH.stat().st_size:,} bytes: {PATH}")


def timed(key: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, OpCall, float, Any]]:
    """The direction and the call that a key stands for, and the fastest config; nothing where it is no call of ours."""
    times = [
        (statistics.median(each["evaluation_times_ms"]) / 1e3, config)
        for config, each in found.items()
        if each.get("evaluation_times_ms")
    ]
    readers = {
        "logits_scale": attention,
        "lhs": ragged_dot,
        "weights": gated_linear_unit,
        "w": loss,
        "subtract_mean": norm,
    }
    reader = next((read for name, read in readers.items() if name in key), None)
    if times and reader is not None and (call := reader(key)) is not None:
        seconds, config = min(times)
        yield *call, seconds, json.loads(config)


def array(text: Any) -> Any:
    """Of "bf16[4,128]"; None of what is no such text."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", text) if isinstance(text, str) else None
    if found is None or found[1] not in DTYPES:
        return None
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, found[2].split(",")))), DTYPES[found[1]])


def direction(key: Mapping[str, Any]) -> str:
    return "backward" if "residuals" in key else "forward"


def attention(key: Mapping[str, Any]) -> tuple[str, OpCall] | None:
    query, keys, values, mask = array(key["q"]), array(key["k"]), array(key["v"]), dict(key["mask"] or {})
    causal = mask.pop("causal_mask", None)
    others = [key.get(name) for name in ("dropout_mask", "paging_info", "q_indices", "k_indices")]
    if any(x is not None for x in (*mask.values(), *others)) or None in (query, keys, values) or len(query.shape) != 4:
        return None
    if causal and (causal.get("offset") or causal.get("window_size")):
        return None
    arrays = {"query": query, "key": keys, "value": values, "bias": array(key["bias"])}
    arrays |= dict.fromkeys(("mask", "segment_ids", "kv_lengths", "sinks"))
    options = {"causal": bool(causal), "window": None, "softcap": key["logits_soft_cap"], "scale": 1.0}
    options |= {"return_lse": False, "query_offset": keys.shape[1] - query.shape[1]}
    if causal and options["query_offset"]:
        return None  # ours would stand at the end of the keys, theirs at the beginning
    return direction(key), OpCall("attention", arrays, options, direction(key))


def ragged_dot(key: Mapping[str, Any]) -> tuple[str, OpCall] | None:
    lhs, rhs, sizes = array(key["lhs"]), array(key["rhs"]), key["group_sizes"]
    numbers = json.dumps(key["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0])
    if None in (lhs, rhs) or key.get("activation") or key.get("fuse_gateup_activation") or numbers not in RAGGED:
        return None
    if RAGGED[numbers] == "of rhs":
        groups = sizes["num_groups"] if isinstance(sizes, dict) else len(sizes)
        d_out = rhs.shape[1]
    else:
        groups, d_out = rhs.shape[0], rhs.shape[1 if RAGGED[numbers] == "of lhs" else 2]
    matrices = jax.ShapeDtypeStruct((groups, lhs.shape[1], d_out), lhs.dtype)
    arrays = {"lhs": lhs, "rhs": matrices, "group_sizes": jax.ShapeDtypeStruct((groups,), "int32"), "bias": None}
    return RAGGED[numbers], OpCall("ragged_dot", arrays, {})


def gated_linear_unit(key: Mapping[str, Any]) -> tuple[str, OpCall] | None:
    x, weights = array(key["x"]), array(key["weights"])
    if None in (x, weights) or key.get("return_residuals"):
        return None
    weight = jax.ShapeDtypeStruct((weights.shape[0], weights.shape[2]), weights.dtype)
    options = {"activation": str(key["activation"]).rpartition(".")[2], "limit": None, "up_offset": 0.0}
    arrays = {"x": x, "w_gate": weight, "w_up": weight, "bias_gate": None, "bias_up": None}
    return "forward", OpCall("gated_linear_unit", arrays, options)


def loss(key: Mapping[str, Any]) -> tuple[str, OpCall] | None:
    hidden, weight, labels = array(key["x"]), array(key["w"]), array(key["labels"])
    if None in (hidden, weight, labels):
        return None
    options = {"softcap": None, "ignore_index": -100, "z_loss": 0.0, "label_smoothing": 0.0}
    arrays = {"hidden": hidden, "weight": weight, "labels": labels, "bias": None}
    return direction(key), OpCall(
        "linear_cross_entropy", arrays, options | {"reduction": key["reduction"]}, direction(key)
    )


def norm(key: Mapping[str, Any]) -> tuple[str, OpCall] | None:
    x = array(key["x"])
    if x is None:
        return None
    arrays = {"x": x, "scale": array(key["scale"]), "offset": array(key["offset"]), "residual": None}
    axis = key.get("axis", -1)
    options = {"kind": "layer" if key["subtract_mean"] else "rms", "epsilon": 1e-6, "scale_offset": 0.0}
    return direction(key), OpCall(
        "norm", arrays, options | {"axis": axis if axis < 0 else axis - len(x.shape)}, direction(key)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
