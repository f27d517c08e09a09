"""Derivatives of a call: a linear primitive, the tangent, whose transpose is the chosen backward pass.

In forward mode the primitive evaluates the tangent of the op's reference. In reverse mode its transpose runs the
backward pass of an implementation, whose own derivative is again the reference's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from stack_core.abi.errors import ArgumentError, PluginError, UnsupportedOp
from stack_core.abi.ops import OWN
from stack_core.ops.dispatch.call import Callee, call, in_axes, zero
from stack_core.ops.dispatch.choosing import plan
from stack_core.ops.dispatch.contexts import Contexts
from stack_core.ops.dispatch.folding import Folding
from stack_core.ops.dispatch.forward import Forward
from stack_core.ops.dispatch.manual_axes import varying
from stack_core.ops.dispatch.passes import backward_pass, program, pruned, read_by_tangent, reference_tangent
from stack_core.ops.dispatch.request import Request

__all__ = ["called"]


def called(request: Request, operands: Sequence[Any]) -> Any:
    """Runs the chosen implementation of a call, with rules for its derivatives."""
    forward = Forward.trace(request, operands, needs_residuals=False)
    return jax.tree.unflatten(forward.structure, _run(forward, operands))


def _run(forward: Forward, operands: Sequence[Any]) -> list[Any]:
    """Runs a forward pass and returns the part of the pool after the operands."""
    return call(_Run(forward), forward.program, operands)


@dataclass(frozen=True, repr=False)
class _Run(Callee):
    """Rules of a forward pass. Residuals have zero tangents, because their readers have derivative rules."""

    forward: Forward

    def __repr__(self) -> str:
        return f"{self.op_name}/{self.forward.plan.forward.implementation.name}"

    @property
    def op_name(self) -> str:
        return self.forward.request.op.name

    @property
    def is_shared(self) -> bool:
        return self.forward.request.is_shared

    def derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        forward, moving = self.forward, tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
        # Traced without residuals until a derivative is taken, so that inference neither computes nor stores them.
        if not forward.residual_names and forward.plan.residuals:
            forward = Forward.trace(forward.request, primals, needs_residuals=True)
        rest = _run(forward, primals)
        pool = (*primals, *rest)
        tangent = Tangent.trace(forward, pool, moving)
        known = [pool[place] for place in tangent.used]
        # One linear equation: `jax.linearize` keeps it whole, and only its transpose runs the chosen backward pass.
        result_tangents = _tangent_p.bind(*known, *(tangents[i] for i in moving), tangent=tangent)
        results = rest if self.forward.residual_names else rest[: forward.outputs]
        return results, [*result_tangents, *map(zero, results[forward.outputs :])]

    def mapped(self, size: int, mapped: Sequence[bool], arguments: Sequence[Any]) -> Sequence[Any]:
        found = self.forward.folded(size, mapped, arguments, _run)
        if found is None:
            return jax.vmap(jaxpr_as_fun(self.forward.program), in_axes=in_axes(mapped))(*arguments)
        return found

    def transposed(self, cotangents: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
        """Transposes the reference: the values that another backward pass might read are unknown."""
        forward, op = self.forward, self.forward.request.op
        moving = tuple(i for i, x in enumerate(arguments) if ad.is_undefined_primal(x))
        names = [forward.names[i] for i in moving]
        if len(moving) > 1 or names[0] not in op.linear_in:
            linear = (
                f"it is linear only in one of {', '.join(op.linear_in)}"
                if op.linear_in
                else "it is not linear in any array"
            )
            raise ArgumentError(
                f"{op.name}: jax.linear_transpose cannot transpose it in {' and '.join(names)}, because {linear}. "
                "Use jax.vjp, which linearizes it first."
            )
        types = tuple(arguments[i].aval for i in moving)
        # An error takes the place of the backward pass, which is not called here.
        tangent = Tangent.of(forward, moving, UnsupportedOp(op.name), types, (), Contexts.current())
        (found,) = tangent.plain_gradients([arguments[i] for i in tangent.used], cotangents)
        return [found if i in moving else None for i in range(len(arguments))]


@dataclass(frozen=True, eq=False, repr=False)
class Tangent:
    """Tangent of a call's result, linear in the tangents of some operands.

    Forward mode and higher derivatives evaluate the reference's tangent, which is traced on first use because reverse
    mode never needs it.

    Attributes:
      forward: forward pass of the call.
      moving: indices of the differentiated operands.
      used: indices of the pool entries read by the backward pass or by the reference's tangent (operands only).
      gradients: jaxpr from the used entries and the cotangents of the result to the cotangents of the differentiated
        operands; or the error to raise instead.
      moving_types: types of the operands' tangents.
      types: types of the result's tangents.
      contexts: contexts of the call.
      levels: one entry for each surrounding `jax.vmap`, the innermost first: its size, and for each argument whether
        its first axis is mapped.
    """

    forward: Forward
    moving: tuple[int, ...]
    used: tuple[int, ...]
    gradients: Any
    moving_types: tuple[Any, ...]
    types: tuple[Any, ...]
    contexts: Contexts
    levels: tuple[tuple[int, tuple[bool, ...]], ...] = ()

    @classmethod
    def trace(cls, forward: Forward, pool: Sequence[Any], moving: tuple[int, ...]) -> "Tangent":
        """Traces the chosen backward pass."""
        outputs = pool[forward.operands : forward.operands + forward.outputs]
        found = forward.plan.backward
        if not isinstance(found, UnsupportedOp):
            found = program(backward_pass, forward, moving, pool, outputs)
        types = tuple(jax.typeof(pool[i]) for i in moving), tuple(jax.typeof(x) for x in outputs)
        make = _shared if forward.request.is_shared else cls.of
        return make(forward, moving, found, *types, Contexts.current())

    @classmethod
    def of(
        cls, forward: Forward, moving: tuple[int, ...], found: Any, moving_types: Any, types: Any, contexts: Contexts
    ) -> "Tangent":
        """Returns the tangent for the jaxpr of a backward pass of (pool, cotangents), or for the error in its place."""
        reads = read_by_tangent(forward, moving)
        if isinstance(found, UnsupportedOp):
            return cls(forward, moving, tuple(sorted(reads)), found, moving_types, types, contexts)
        gradients, used = pruned(found, len(forward.shapes), reads)
        return cls(forward, moving, used, gradients, moving_types, types, contexts)

    def __repr__(self) -> str:
        chosen = self.forward.plan.backward
        name = "none" if isinstance(chosen, UnsupportedOp) else chosen.implementation.name
        return f"{self.forward.request.op.name}/{name} backward"

    def move(self, *arguments: Any) -> Sequence[Any]:
        """Computes the reference's tangents from the used entries and the operands' tangents, without `levels`."""
        known, tangents = arguments[: len(self.used)], arguments[len(self.used) :]
        operands = {place: x for place, x in zip(self.used, known, strict=True) if place < self.forward.operands}
        # An operand that is never read is filled in with any value of its type: its own tangent.
        missing = {place: x for place, x in zip(self.moving, tangents, strict=True) if place not in operands}
        filled = [{**operands, **missing}[place] for place in range(self.forward.operands)]
        with self.contexts.entered():  # JAX may lower this after the caller's contexts have ended
            found = program(reference_tangent, self.forward, self.moving, filled, tangents)
        # Whatever the reference reads of a filled-in operand would make the result wrong, so it must be unused.
        run, used = pruned(found, len(filled), frozenset())
        if wrong := [self.forward.names[place] for place in used if place in missing]:
            op = self.forward.request.op.name
            raise PluginError(f"{op}: `linear_in` names {wrong[0]!r}, but the reference is not linear in it.")
        return jaxpr_as_fun(run)(*(filled[place] for place in used), *tangents)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Computes the result's tangents from the used entries and the operands' tangents, mapped over `levels`."""
        run = lambda *arguments: tuple(self.move(*arguments))
        for _, mapped in self.levels:
            run = jax.vmap(run, in_axes=in_axes(mapped))
        return run(*arguments)

    def transposed(self, known: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """Computes the gradients of the differentiated operands."""
        # Raises or warns if the backward pass cannot be as requested, now that a gradient is needed.
        self.forward.plan.heeded_backward()
        return self._over(self.levels, known, cotangents)

    def _over(self, levels: Any, known: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        if not levels:
            return self._gradients(*known, *cotangents)
        # The outermost `jax.vmap` is the last level and is undone first.
        *inner, (size, mapped) = levels
        of_known, of_moving = mapped[: len(self.used)], mapped[len(self.used) :]
        # The innermost level may be folded into an axis of the op; the others are mapped.
        if not inner:
            folded = self.folded(size, of_known, known, cotangents, per_example=of_moving)
            if folded is not None:
                return folded
        run = jax.vmap(
            lambda *arguments: tuple(self._over(inner, arguments[: len(known)], arguments[len(known) :])),
            in_axes=in_axes((*of_known, *(True for _ in cotangents))),
        )
        found = run(*known, *cotangents)
        return [
            x if is_mapped else jnp.sum(x, axis=0).astype(x.dtype)
            for x, is_mapped in zip(found, of_moving, strict=True)
        ]

    def _gradients(self, *arguments: Any) -> Sequence[Any]:
        return call(_Gradients(self), self.gradients, arguments)

    def plain_gradients(self, known: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Computes the reference's gradients."""
        transposed = jax.linear_transpose(lambda *tangents: tuple(self.move(*known, *tangents)), *self.moving_types)
        return tuple(transposed(tuple(cotangents)))

    def folded(
        self,
        size: int,
        mapped: Sequence[bool],
        known: Sequence[Any],
        cotangents: Sequence[Any],
        per_example: Sequence[bool] | None = None,
    ) -> list[Any] | None:
        """Computes the gradients of a mapped call with the mapped axis folded into an axis of the op.

        The implementation is chosen again for the folded call.

        Args:
          size: size of the mapped axis.
          mapped: whether each used entry is mapped.
          known: the used entries.
          cotangents: cotangents of the result, all mapped.
          per_example: for each differentiated operand, whether its gradient is per example instead of summed over the
            examples. By default all are per example.

        Returns:
          The gradients, or None if folding is impossible.
        """
        forward = self.forward
        axes, shapes = forward.pool_axes, forward.shapes
        folding = Folding.of(
            size, forward.request.op.folds, axes[: forward.operands], [x.shape for x in shapes[: forward.operands]]
        )
        # Gradients that have the folded axis come back per example; others come back summed over the examples.
        of_moving = [axes[i] for i in self.moving]
        of_outputs = axes[forward.operands : forward.operands + forward.outputs]
        may_fold = OWN not in forward.residual_names and all(
            folding is not None and folding.has(x) for x in axes[forward.operands :]
        )
        if folding is None or not may_fold or any(map(varying, (*known, *cotangents))):
            return None
        is_own = [
            folding.has(x) and folding.own in (1, *_sizes(folding, x, shapes[i]))
            for x, i in zip(of_moving, self.moving, strict=True)
        ]
        if not all(
            own or (per_example is not None and not each)
            for own, each in zip(is_own, per_example or is_own, strict=True)
        ):
            return None
        folded = folding.fold_all([axes[i] for i in self.used], known, mapped)
        of_result = folding.fold_all(of_outputs, cotangents, [True] * len(cotangents))
        again = self._again(folding)
        if folded is None or of_result is None or again is None:
            return None
        by_place = dict(zip(self.used, folded, strict=True))
        found = again._gradients(*(by_place[place] for place in again.used), *of_result)
        gradients = [
            folding.unfold(of_one or "", x) if own else x
            for of_one, own, x in zip(of_moving, is_own, found, strict=True)
        ]
        if per_example is None:
            return gradients
        # Operands that all examples share need the sum over the examples.
        adding = [own and not each for own, each in zip(is_own, per_example, strict=True)]
        return [
            jnp.sum(x, axis=0).astype(x.dtype) if is_sum else x for is_sum, x in zip(adding, gradients, strict=True)
        ]

    def _again(self, folding: Folding) -> "Tangent | None":
        """Returns the tangent of the folded call; None if it is unsupported or reads other entries of the pool."""
        forward = self.forward
        shapes = [folding.struct(of_one, x) for of_one, x in zip(forward.pool_axes, forward.shapes, strict=True)]
        request = forward.folded_request(folding)
        try:
            chosen = plan(request, shapes[: forward.operands], mapped=True)
        except UnsupportedOp:
            return None
        # The forward pass has run already, so the folded backward pass must make do with its residuals.
        if not set(forward.residual_names) <= set(chosen.residuals) or isinstance(chosen.backward, UnsupportedOp):
            return None
        folded = dataclasses.replace(forward, request=request, plan=chosen, shapes=tuple(shapes))
        found = Tangent.trace(folded, shapes, self.moving)
        # Entries that the first trace dropped are no longer available.
        return found if set(found.used) <= set(self.used) else None


def _sizes(folding: Folding, axes: str | None, struct: Any) -> tuple[int, ...]:
    """Returns the size of one example along the folded axis."""
    if folding.into == "..." or not folding.has(axes):
        return (folding.own,)
    grown = folding.shape(axes, struct.shape)
    return tuple(size for size, larger in zip(struct.shape, grown, strict=True) if size != larger)


@dataclass(frozen=True, repr=False)
class _Gradients(Callee):
    """Rules of the chosen backward pass; its own derivative is the reference's."""

    tangent: Tangent

    def __repr__(self) -> str:
        return repr(self.tangent)

    @property
    def is_shared(self) -> bool:
        return self.tangent.forward.request.is_shared

    def derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = len(self.tangent.used)
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

        def plain_gradients(*values: Any) -> tuple[Any, ...]:
            filled = list(primals)
            for place, x in zip(moving, values, strict=True):
                filled[place] = x
            return self.tangent.plain_gradients(filled[:count], filled[count:])

        _, gradient_tangents = jax.jvp(plain_gradients, [primals[i] for i in moving], [tangents[i] for i in moving])
        return call(self, self.tangent.gradients, primals), gradient_tangents

    def mapped(self, size: int, mapped: Sequence[bool], arguments: Sequence[Any]) -> Sequence[Any]:
        count, found = len(self.tangent.used), None
        if all(mapped[count:]):
            found = self.tangent.folded(size, mapped[:count], arguments[:count], arguments[count:])
        if found is None:
            return jax.vmap(jaxpr_as_fun(self.tangent.gradients), in_axes=in_axes(mapped))(*arguments)
        return found

    def transposed(self, cotangents: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
        """Transposes the gradients, which are linear in the cotangents, to the reference's tangent."""
        count = len(self.tangent.used)
        if any(map(ad.is_undefined_primal, arguments[:count])) or not all(
            map(ad.is_undefined_primal, arguments[count:])
        ):
            op = self.tangent.forward.request.op.name
            raise ArgumentError(f"{op}: its gradient can be transposed in all cotangents at once. Use jax.vjp.")
        return [*[None] * count, *self.tangent.move(*arguments[:count], *cotangents)]


# Equal tangents are one object, because JAX lowers an equation once for each distinct parameter.
_shared = functools.lru_cache(maxsize=8192)(Tangent.of)


def _transpose(cotangents: Sequence[Any], *arguments: Any, tangent: Tangent) -> list[Any]:
    count = len(tangent.used)
    filled = [ad.instantiate_zeros(x) for x in cotangents]
    return [None] * count + list(tangent.transposed(arguments[:count], filled))


def _batch(arguments: Sequence[Any], axes: Sequence[Any], *, tangent: Tangent) -> tuple[list[Any], list[int]]:
    mapped = tuple(axis is not None for axis in axes)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arguments, axes, strict=True)]
    size = next(x.shape[0] for x, is_mapped in zip(moved, mapped, strict=True) if is_mapped)
    levels = (*tangent.levels, (size, mapped))
    batched = dataclasses.replace(tangent, levels=levels)
    # The mapped types of the results, from an abstract evaluation.
    types = jax.make_jaxpr(batched)(*moved).out_avals
    found = _tangent_p.bind(*moved, tangent=dataclasses.replace(batched, types=tuple(types)))
    return list(found), [0] * len(found)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tangent: Tangent) -> Any:
    return jax.jvp(tangent, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))


_tangent_p = Primitive("stack_tangent")
_tangent_p.multiple_results = True
# Compiled also outside of `jit`, where the tangent would otherwise run operation by operation.
_tangent_p.def_impl(lambda *arguments, tangent: jax.jit(tangent)(*arguments))
_tangent_p.def_abstract_eval(lambda *arguments, tangent: list(tangent.types))
ad.primitive_jvps[_tangent_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batch
mlir.register_lowering(
    _tangent_p,
    lambda context, *arguments, tangent: mlir.lower_fun(tangent, multiple_results=True)(context, *arguments),
)
