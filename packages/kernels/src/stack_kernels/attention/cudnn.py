"""`attention` on NVIDIA GPUs: cuDNN's kernel, called through `jax.nn`.

`jax.nn` rounds the lse that it returns to the dtype of the operands, so the kernel provides none. For its own gradient
it saves the float32 lse on one GPU; a call that several GPUs share runs the forward kernel again.
"""

import ctypes.util
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import differentiated
from stack_kernels.supports import first_problem, takes_no

__all__ = ["CUDNN", "is_installed"]

_DTYPES = ("bfloat16", "float16")
_MAX_FEATURES = 128  # jax checks the local device, not the target, for support of more
_MAX_MASK_BYTES = 2**30


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    query, key, value = (call.arrays[name] for name in ("query", "key", "value"))
    options, (batch, q_seq, _, features), kv_seq = call.options, query.shape, key.shape[1]
    if (refusal := takes_no(call, "bias", "mask", "kv_lengths", "softcap", "sinks")) is not True:
        return refusal
    is_aligned = q_seq == kv_seq and options.get("query_offset") == 0
    # jax turns a mask into a bias, which has two bytes for each pair of a query and a key.
    mask_bytes = 0 if call.arrays["segment_ids"] is None else 2 * batch * q_seq * kv_seq
    problems = {
        "it takes one query_offset for all rows, known while tracing": "query_offset" in call.arrays,
        "it returns no lse": options["return_lse"],
        f"it takes {' or '.join(_DTYPES)}, not {query.dtype.name}": query.dtype.name not in _DTYPES,
        f"it takes heads of a multiple of 8 features, at most {_MAX_FEATURES}, not {features}": features % 8
        or features > _MAX_FEATURES,
        f"it takes values of as many features as keys, not {value.shape[3]} and {features}": features != value.shape[3],
        f"it takes even numbers of queries and of keys, not {q_seq} and {kv_seq}": q_seq % 2 or kv_seq % 2,
        f"it takes causal windows with a left end, not {options['window']} with causal={options['causal']}": options[
            "window"
        ]
        is not None
        and not (options["causal"] and options["window"][0] is not None),
        # cuDNN's causal mask begins with query 0 at key 0.
        "it takes causal queries at the places of the keys alone": options["causal"] and not is_aligned,
        f"a mask of the segments would take {mask_bytes} bytes": mask_bytes > _MAX_MASK_BYTES,
        "cuDNN is not installed: pip install nvidia-cudnn-cu13": not is_installed(),
    }
    return first_problem(problems)


@functools.cache
def is_installed() -> bool:
    """Checks whether cuDNN is available, as a wheel or as a system library."""
    wheel = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    return wheel is not None or ctypes.util.find_library("cudnn") is not None


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    segment_ids: Any,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float,
    requested: frozenset[str],
    **unused: Any,
) -> tuple[Any, dict[str, Any]]:
    left = None if window is None else window[0]

    def attend(query: Any, key: Any, value: Any, segment_ids: Any) -> Any:
        allowed = None if segment_ids is None else _same_segment(*segment_ids)
        output: Any = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=allowed,
            scale=scale,
            is_causal=causal,
            local_window_size=None if left is None else (left, 0),
            implementation="cudnn",
        )
        return output if allowed is None else jnp.where(_sees_any(allowed, causal, left), output, 0)

    return _on_one_device(attend)(query, key, value, segment_ids), {}


def _same_segment(of_queries: Any, of_keys: Any) -> Any:
    """Returns the mask of equal segments, bool[batch, 1, q_seq, kv_seq]."""
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]


def _sees_any(allowed: Any, causal: bool, left: int | None) -> Any:
    """Returns whether each query may attend to any key, [batch, q_seq, 1, 1].

    For other queries cuDNN averages all values.
    """
    distance = jnp.arange(allowed.shape[2])[:, None] - jnp.arange(allowed.shape[3])
    if causal:
        allowed &= distance >= 0
    if left is not None:
        allowed &= distance <= left
    return jnp.any(allowed, axis=3)[:, 0, :, None, None]


def _on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function as one device's program of a mesh, unless it is inside a `shard_map` already.

    JAX looks up the kernel's partitioning rule only in the outermost program and misses it inside nested calls.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        return function
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,)) if mesh.empty else mesh
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


_forward, _backward = differentiated(_attention)
CUDNN = OpImplementation(
    "attention",
    "cudnn",
    _forward,
    _backward,
    platforms=("gpu",),
    supports=_supports,
    residuals=(OWN,),
    is_opaque=True,
    exports=False,
)
