"""Access to the parts of jaxprs that differ between the supported versions of JAX."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.programs.jaxprs import bind, consts_of, equations_of, inherit_trace_context, inner, scan_counts

__all__ = [
    "bind",
    "consts_of",
    "equations_of",
    "inherit_trace_context",
    "inner",
    "scan_counts",
    "source_of",
    "struct_like",
]

_NOT_THE_USER = re.compile(r"[/\\](stack_core|stack_quant|jaxtyping|flax|beartype)[/\\]|^<")


def source_of(equation: Any) -> str:
    """Returns the position of an equation in the user's code, "path:line", or ""."""
    from jax._src import source_info_util  # not available in JAX's public API

    # The innermost frame often lies in a library, which would tell the user nothing.
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        if not _NOT_THE_USER.search(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
    return ""


def struct_like(array: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array that varies over the same manual mesh axes as a (quantized) array.

    Inside `jax.shard_map`, such as in a pipeline stage, a program traced for other axes would not fit its inputs.
    """
    kind = jax.typeof(jax.tree.leaves(array)[0])
    if not kind.mat.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    replicated = NamedSharding(kind.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated, manual_axis_type=kind.mat)
