"""Programs as portable StableHLO artifacts of a pinned version; the only file that uses private names of JAX.

`jax.export`'s own files open for six months and not in older releases. The module alone, written in an old version of
StableHLO, opens in every JAX that is supported.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from stack_core import ops
from stack_core.abi.errors import BundleError

__all__ = ["PINNED", "Module", "Specs", "current_target", "lower", "open_module"]

PINNED = "1.13.7"

_SHARDINGS = ("sdy.sharding", "sdy.sharding_rule")

Specs = Sequence[jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program for fixed shapes.

    Attributes:
      kept: indices of the arguments that the program takes; all other arguments are unused.
      calling_convention: version of `jax.export`'s calling convention.
      custom_calls: targets of custom calls outside StableHLO.
    """

    artifact: bytes
    kept: tuple[int, ...]
    calling_convention: int
    custom_calls: tuple[str, ...] = ()


def current_target() -> str:
    """Returns the platform of this process, for which programs are exported and opened: "cpu", "cuda", "tpu"."""
    return export.default_export_platform()


def lower(function: Callable[..., Sequence[Any]], arguments: Specs) -> tuple[Module, Specs]:
    """Traces a function of flat arguments for the current target; returns it and its results.

    Raises:
      BundleError: it cannot be exported; says why.
    """
    try:
        with ops.for_export():
            exported = export.export(jax.jit(function))(*arguments)
        if exported.nr_devices != 1:
            raise ValueError(f"it is split over {exported.nr_devices} devices")
        text = _without_shardings(exported.mlir_module())
        artifact = stablehlo.serialize_portable_artifact_str(text, PINNED)
    except (ValueError, NotImplementedError) as error:
        raise BundleError(f"The function cannot be exported: {error}") from error
    module = Module(
        bytes(artifact),
        tuple(exported.module_kept_var_idx),
        exported.calling_convention_version,
        tuple(sorted(set(re.findall(r"custom_call @([\w.$]+)", text)))),
    )
    return module, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.out_avals]


def _without_shardings(text: str) -> str:
    """Removes the attributes by which Shardy splits calls over devices, which portable artifacts cannot hold.

    JAX gives them to LAPACK's calls even if there is one device.

    Raises:
      ValueError: an operation is of that dialect, so that the program needs a mesh.
    """
    # Parsing a large module takes long and is rarely needed.
    if "sdy." not in text:
        return text
    names: list[str] = []

    def strip(operation: ir.Operation) -> ir.WalkResult:
        names.append(operation.name)
        for name in _SHARDINGS:
            if name in operation.attributes:
                del operation.attributes[name]
        return ir.WalkResult.ADVANCE

    lowered: Any = jax.jit(lambda: 0).lower().compiler_ir()  # its context has the dialects of JAX's programs
    module = ir.Module.parse(text, lowered.context)
    module.operation.walk(strip)
    if meshed := next((name for name in names if name.startswith("sdy.")), None):
        raise ValueError(f"it has the operation {meshed}, which needs a mesh; trace it without one")
    return str(module.operation.get_asm(enable_debug_info=True))


def open_module(module: Module, arguments: Specs, results: Specs) -> Callable[..., list[jax.Array]]:
    """Makes a function of flat arguments of a module whose digest was compared; it compiles when it is jitted."""
    in_avals, out_avals = (
        tuple(jax.core.ShapedArray(spec.shape, spec.dtype) for spec in specs) for specs in (arguments, results)
    )
    unspecified = {name: (None,) * len(avals) for name, avals in (("in", in_avals), ("out", out_avals))}
    values: dict[str, Any] = {
        "fun_name": "main",
        "in_tree": jax.tree.structure((in_avals, {})),
        "in_avals": in_avals,
        "out_tree": jax.tree.structure(list(out_avals)),
        "out_avals": out_avals,
        "nr_devices": 1,
        "platforms": (current_target(),),
        "ordered_effects": (),
        "unordered_effects": (),
        "disabled_safety_checks": (),
        "mlir_module_serialized": module.artifact,
        "calling_convention_version": module.calling_convention,
        "module_kept_var_idx": module.kept,
        "uses_global_constants": False,
        "_get_vjp": None,
        "_has_named_shardings": True,
    }
    for side, nothing in unspecified.items():  # Their names differ between versions of JAX.
        values |= {f"{side}_shardings_hlo": nothing, f"{side}_named_shardings": nothing}
        values |= {f"_{side}_named_shardings": nothing}
    # Only the fields that the installed JAX has.
    fields = {field.name: values[field.name] for field in dataclasses.fields(export.Exported)}
    call: Callable[..., Any] = export.Exported(**fields).call
    return call
