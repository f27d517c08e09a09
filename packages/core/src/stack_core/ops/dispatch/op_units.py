"""Op calls as single jaxpr equations, for programs that read and rewrite jaxprs.

Under `as_units`, a call of an op is traced as one equation for any implementation. Evaluation, compilation, batching
and derivatives of the equation match the call at the place of tracing. A jaxpr with units can therefore be run
unchanged, or a rewriter may call the op again with other arrays.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.ops.dispatch.contexts import Contexts
from stack_core.ops.dispatch.dispatch import dispatch, recording, run
from stack_core.ops.dispatch.op import op_named
from stack_core.ops.dispatch.request import Implementation, Request
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["OpUnit", "as_units", "unit_of"]


@dataclass(frozen=True, eq=False)
class OpUnit:
    """Parameter of a unit equation: a call of an op without its arrays.

    Attributes:
      op: name of the op, such as "linear".
      options: static arguments by parameter name.
      implementation: implementations requested by the caller.
      axes: logical axis names of operands, by parameter name.
      names: array parameters, in order.
      structure: pytree structure of the tuple of their arrays; its leaves are the operands of the equation.
      jaxpr: traced call, from the operands to the leaves of its result.
      contexts: contexts of the trace.
      batching: one entry for each `jax.vmap` around the call, the innermost first: the mapped axis of each operand, or
        None. Results are mapped along their first axis.
    """

    op: str
    options: Mapping[str, Any]
    implementation: Implementation
    axes: LogicalNames | None
    names: tuple[str, ...]
    structure: Any
    jaxpr: Any
    contexts: Contexts
    batching: tuple[tuple[int | None, ...], ...] = ()

    def arrays(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the arrays by parameter name; each operand may be any object, including a quantized array."""
        return dict(zip(self.names, jax.tree.unflatten(self.structure, operands), strict=True))

    def __call__(self, *operands: Any) -> Any:
        """Calls the op again with the mesh, chip and tuned table of the first call.

        Args:
          operands: one operand for each leaf of `structure`. All leaves of a pytree in the place of a leaf,
            such as a quantized array, are mapped along the same axis.
        """

        def call(*operands: Any) -> Any:
            return dispatch(op_named(self.op), self.arrays(operands), self.options, self.implementation, self.axes)

        for axes in self.batching:
            call = jax.vmap(call, in_axes=axes)
        with self.contexts.entered():
            return call(*operands)


@contextlib.contextmanager
def as_units() -> Iterator[None]:
    """Traces each call of an op in the block as one equation.

    The context is part of the cache key of `jax.jit`, so functions traced inside are not reused outside. The first use
    in a process makes JAX trace and compile again all functions that it compiled before.
    """
    with recording(_bind):
        yield


def unit_of(equation: Any) -> OpUnit | None:
    """Returns the unit of a jaxpr equation, or None for any other equation."""
    return equation.params["unit"] if equation.primitive is _primitive() else None


def _bind(request: Request, operands: Sequence[Any]) -> Any:
    # Without the recorder, which would record the call inside its own equation again.
    with recording(None):
        jaxpr, result = jax.make_jaxpr(lambda *operands: run(request, list(operands)), return_shape=True)(*operands)
    unit = OpUnit(
        op=request.op.name,
        options=request.options,
        implementation=request.implementation,
        axes=request.axes,
        names=request.names,
        structure=request.structure,
        jaxpr=jaxpr,
        contexts=Contexts.current(),
    )
    return jax.tree.unflatten(jax.tree.structure(result), _primitive().bind(*operands, unit=unit))


def _evaluated(*operands: Any, unit: OpUnit) -> list[Any]:
    from jax.extend.core import jaxpr_as_fun

    return jaxpr_as_fun(unit.jaxpr)(*operands)


def _mapped(unit: OpUnit, operands: Sequence[Any], axes: tuple[int | None, ...]) -> OpUnit:
    evaluated = functools.partial(_evaluated, unit=unit)
    jaxpr = jax.make_jaxpr(jax.vmap(evaluated, in_axes=axes))(*operands)
    return dataclasses.replace(unit, jaxpr=jaxpr, batching=(*unit.batching, axes))


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive("stack_op")
    primitive.multiple_results = True

    def jvp(primals: Any, tangents: Any, *, unit: OpUnit) -> Any:
        # `jax.jvp` does not accept symbolic zeros.
        tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
        return jax.jvp(functools.partial(_evaluated, unit=unit), tuple(primals), tuple(tangents))

    def batched(operands: Any, axes: Any, *, unit: OpUnit) -> Any:
        mapped = _mapped(unit, operands, tuple(axis if isinstance(axis, int) else None for axis in axes))
        results = primitive.bind(*operands, unit=mapped)
        return results, [0] * len(results)

    primitive.def_impl(_evaluated)
    primitive.def_abstract_eval(lambda *operands, unit: unit.jaxpr.out_avals)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(_evaluated, multiple_results=True))
    return primitive
