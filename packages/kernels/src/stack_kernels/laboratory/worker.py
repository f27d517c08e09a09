"""A process of the laboratory: compiles for one architecture and reports the results line by line.

    python -m stack_kernels.laboratory.worker v6e attention/splash norm/reference

Mosaic-GPU compiles for one architecture per process, and a failing compiler may end the process. Therefore
`experiments` starts one process per chip and reads its lines.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from stack_core import ops
from stack_core.abi.errors import StackError
from stack_core.abi.plugins import registries
from stack_core.chips import Target, use_target
from stack_kernels.laboratory.calls import AXIS, DEVICES, LabCall, calls_for
from stack_kernels.laboratory.experiments import Row
from stack_kernels.laboratory.programs import usage_of
from stack_kernels.laboratory.without_cudnn import pretend_cudnn

__all__ = ["main", "target_of"]

_OF_ONE = {"v5e": "1x1", "v5p": "1x1x1", "v6e": "1x1", "v7x": "1x1x1"}
_OF_FOUR = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "v7x": "2x2x1"}


def target_of(chip: str, devices: int = 1) -> Target:
    """Returns the smallest target with one or four devices of a chip."""
    sizes = _OF_ONE.get(chip, "1x1x1") if devices == 1 else _OF_FOUR.get(chip, "1x1x4")
    return Target(f"{chip}:{sizes}")


def main(chip: str, *names: str) -> None:
    """Compiles the laboratory's calls with each implementation; prints a line before and after each of them."""
    # A copy of standard output: `_printed` redirects the original to a file during compilation.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for name in names:
        implementation = name.partition("/")[2]
        for call in calls_for(name):
            for direction in _directions(implementation, call):
                key = {"name": name, "chip": chip, "call": call.name, "direction": direction}
                print(json.dumps({"starts": key}), file=lines, flush=True)
                row = _row(Row(**key), call, implementation)
                print(json.dumps({"row": dataclasses.asdict(row)}), file=lines, flush=True)


def _directions(implementation: str, call: LabCall) -> tuple[str, ...]:
    """Lists the directions to compile; for a reference, whose gradient is JAX's, the gradient's program covers both."""
    if not call.gradient:
        return ("forward",)
    return ("gradient",) if implementation == "reference" else ("forward", "gradient")


def _row(row: Row, call: LabCall, implementation: str) -> Row:
    function = functools.partial(getattr(ops, call.op), implementation=implementation, **call.options)
    target = target_of(row.chip, 1 if call.parts is None else DEVICES)
    try:
        with pretend_cudnn(), use_target(target), _printed() as output, warnings.catch_warnings():
            if row.direction == "gradient":  # another implementation's backward pass is expected
                warnings.filterwarnings("ignore", ".* was named and runs forward, but not backward", RuntimeWarning)
            started_s = time.monotonic()
            program, arguments = _program(function, call, target, gradient=row.direction == "gradient")
            compiled = jax.jit(program).lower(arguments).compile()
            duration_s = time.monotonic() - started_s
            output.seek(0)
            printed = output.read()
    except StackError as error:
        return dataclasses.replace(row, status="refused", reason=_reason(error, implementation))
    except Exception as error:  # a compiler may fail in any way; the next call may work
        return dataclasses.replace(row, status="failed", reason=f"{type(error).__name__}: {error}"[:500])
    usage, text = usage_of(compiled.as_text() or "", printed), None
    if registries.ops[row.name].is_opaque and not usage.kernels:
        text = "the program calls no kernel: something else was compiled"
    memory = compiled.memory_analysis()
    return dataclasses.replace(
        row,
        status="compiled" if text is None else "failed",
        reason=text,
        compile_s=round(duration_s, 2),
        temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
        **dataclasses.asdict(usage),
    )


def _program(function: Any, call: LabCall, target: Target, *, gradient: bool) -> tuple[Any, Any]:
    """Returns the function of the arrays to compile, and the sharded array structs."""
    if call.parts is None:
        place: Any = SingleDeviceSharding(target.devices[0])
        placed = {name: _with_sharding(x, place) for name, x in call.arrays.items()}
    else:
        mesh = Mesh(np.array(target.devices[:DEVICES]), (AXIS,))
        specs, spec = call.parts
        pairs = zip(call.arrays.items(), specs, strict=True)
        placed = {name: _with_sharding(x, NamedSharding(mesh, of_one)) for (name, x), of_one in pairs}
        function = _on_parts(function, mesh, tuple(call.arrays), specs, spec)
    if not gradient:
        return lambda arrays: function(**arrays), placed

    def total(moving: Any, rest: Any) -> Any:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(**moving, **rest)))

    def gradients(arrays: Any) -> Any:
        moving = {name: x for name, x in arrays.items() if name in call.gradient}
        rest = {name: x for name, x in arrays.items() if name not in call.gradient}
        return jax.value_and_grad(total)(moving, rest)

    return gradients, placed


def _on_parts(
    function: Any, mesh: Mesh, names: tuple[str, ...], specs: tuple[PartitionSpec, ...], spec: PartitionSpec
) -> Any:
    def on_part(*arrays: Any) -> Any:
        return function(**dict(zip(names, arrays, strict=True)))

    mapped = jax.shard_map(on_part, mesh=mesh, in_specs=specs, out_specs=spec)
    return lambda **arrays: mapped(*(arrays[name] for name in names))


def _with_sharding(array: Any, place: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), array)


def _reason(error: StackError, implementation: str) -> str:
    """Extracts the implementation's own reason from a message with one line per implementation."""
    lines = [line.strip() for line in str(error).splitlines()]
    own = (line.removeprefix(f"{implementation}: ") for line in lines if line.startswith(f"{implementation}: "))
    return next(own, str(error))


@contextlib.contextmanager
def _printed() -> Iterator[IO[str]]:
    """Captures everything printed in the block, including by compilers written in other languages."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        # Descriptors and not `sys.stdout`, because compilers in C++ write to these directly.
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, earlier in zip((1, 2), kept, strict=True):
                os.dup2(earlier, descriptor)
                os.close(earlier)


if __name__ == "__main__":
    main(*sys.argv[1:])
