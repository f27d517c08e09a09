"""The derivatives of a call: one linear primitive, the tangent, whose transpose is the backward that was chosen.

Evaluated, which is forward mode, the tangent is that of the op's reference. Transposed, which is reverse mode, it is
the backward pass of an implementation, whose own derivative is again the reference's.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from stack_core.abi import OWN
from stack_core.errors import UnsupportedOp
from stack_core.jaxprs import equations_of
from stack_core.ops._choosing import plan
from stack_core.ops._folding import Folding
from stack_core.ops._forward import Forward
from stack_core.ops._manual_axes import varying
from stack_core.ops._plain import plain
from stack_core.ops._splitting import like

__all__ = ["called"]

_Function = Callable[..., Sequence[Any]]


def called(forward: Forward, operands: Sequence[Any]) -> Any:
    """The result of a call that was traced as `forward` without residuals, to be differentiated."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return jax.tree.unflatten(forward.structure, forward(*operands))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        kept = Forward.trace(forward.request, primals, wants=True)
        rest, moved = _moved(kept, primals, tangents)
        unflatten = kept.structure.unflatten
        return unflatten(rest[: kept.outputs]), unflatten(moved)

    call.defjvp(rule, symbolic_zeros=True)
    return call(*operands)


def _moved(forward: Forward, operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The rest of the pool, and the tangents of the leaves of the result."""
    rest = _with_residuals(forward)(*operands)
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, jax.custom_derivatives.SymbolicZero))
    if not moving:
        return rest, [_zero(x) for x in rest[: forward.outputs]]
    tangent = Tangent.trace(forward, (*operands, *rest), moving)
    pool = (*operands, *rest)
    known = [pool[place] for place in tangent.used]
    return rest, _tangent_p.bind(*known, *(tangents[i] for i in moving), tangent=tangent)


def _with_residuals(forward: Forward) -> _Function:
    """`forward`, whose derivative is that of its result: what reads the residuals has derivatives of its own."""

    @jax.custom_jvp
    def call(*operands: Any) -> tuple[Any, ...]:
        return forward(*operands)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        rest, moved = _moved(forward, primals, tangents)
        return tuple(rest), (*moved, *(_zero(x) for x in rest[forward.outputs :]))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _zero(x: Any) -> Any:
    return jax.custom_derivatives.zero_from_primal(x, symbolic_zeros=True)


@dataclass(frozen=True, eq=False)
class Tangent:
    """The tangent of a call's result, linear in the tangents of some operands.

    Attributes:
      moving: those operands.
      used: what is read of the pool.
      move: from what is used and the tangents of the operands to those of the result; the reference's.
      gradients: from what is used and the cotangents of the result to those of the operands; or what asking for them
        raises.
      moving_types: of the tangents.
      types: of the result's tangents.
      levels: one entry for each `jax.vmap` around it, the innermost first: its size, and which of its arguments have
        that axis, as their first.
    """

    forward: Forward
    moving: tuple[int, ...]
    used: tuple[int, ...]
    move: _Function
    gradients: _Function | UnsupportedOp
    moving_types: tuple[Any, ...]
    types: tuple[Any, ...]
    levels: tuple[tuple[int, tuple[bool, ...]], ...] = ()

    @classmethod
    def trace(cls, forward: Forward, pool: Sequence[Any], moving: tuple[int, ...]) -> "Tangent":
        """Traces the reference's tangent and the backward pass that was chosen."""
        operands = pool[: forward.operands]
        outputs = pool[forward.operands : forward.operands + forward.outputs]
        moved = _Pruned.trace(_reference_tangent(forward, moving), operands, [operands[i] for i in moving])
        found: _Pruned | UnsupportedOp
        if isinstance(forward.plan.backward, UnsupportedOp):
            found = forward.plan.backward
        else:
            found = _Pruned.trace(_backward(forward, moving), pool, outputs)
        used = sorted({*moved.used, *(found.used if isinstance(found, _Pruned) else ())})
        return cls(
            forward=forward,
            moving=moving,
            used=tuple(used),
            move=moved.reading(used),
            gradients=found.reading(used) if isinstance(found, _Pruned) else found,
            moving_types=tuple(jax.typeof(operands[i]) for i in moving),
            types=tuple(jax.typeof(x) for x in outputs),
        )

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """The result's tangents: of what is used, then the operands' tangents."""
        run = lambda *arguments: tuple(self.move(*arguments))
        for _, mapped in self.levels:
            run = jax.vmap(run, in_axes=_in_axes(mapped))
        return run(*arguments)

    def transposed(self, known: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the operands."""
        self.forward.plan.heeded_backward()
        return self._over(self.levels, known, cotangents)

    def _over(self, levels: Any, known: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        if not levels:
            return self._gradients(*known, *cotangents)
        *inner, (size, mapped) = levels
        of_known, of_moving = mapped[: len(self.used)], mapped[len(self.used) :]
        if not inner:
            folded = self._folded(size, of_known, known, cotangents, summed=of_moving)
            if folded is not None:
                return folded
        run = jax.vmap(
            lambda *arguments: tuple(self._over(inner, arguments[: len(known)], arguments[len(known) :])),
            in_axes=_in_axes((*of_known, *(True for _ in cotangents))),
        )
        found = run(*known, *cotangents)
        return [
            x if is_mapped else jnp.sum(x, axis=0).astype(x.dtype)
            for x, is_mapped in zip(found, of_moving, strict=True)
        ]

    def _gradients(self, *arguments: Any) -> Sequence[Any]:
        """The gradients, whose own derivative is the reference's."""
        run = jax.custom_jvp(self._mapped_gradients)
        run.defjvp(lambda primals, tangents: jax.jvp(self._plain_gradients, primals, tangents))
        return run(*arguments)

    def _plain_gradients(self, *arguments: Any) -> tuple[Any, ...]:
        known, cotangents = arguments[: len(self.used)], arguments[len(self.used) :]
        transposed = jax.linear_transpose(lambda *moved: tuple(self.move(*known, *moved)), *self.moving_types)
        return tuple(transposed(tuple(cotangents)))

    def _mapped_gradients(self, *arguments: Any) -> tuple[Any, ...]:
        assert not isinstance(self.gradients, UnsupportedOp), "heeded_backward raised"
        gradients = self.gradients
        run = custom_vmap(lambda *arguments: tuple(gradients(*arguments)))

        @run.def_vmap
        def _(size: int, mapped: Sequence[bool], *arguments: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
            known, cotangents = arguments[: len(self.used)], arguments[len(self.used) :]
            found = None
            if all(mapped[len(known) :]):
                found = self._folded(size, mapped[: len(known)], known, cotangents)
            if found is None:
                found = jax.vmap(lambda *arguments: tuple(gradients(*arguments)), in_axes=_in_axes(mapped))(*arguments)
            return tuple(found), (True,) * len(found)

        return tuple(run(*arguments))

    def _folded(
        self,
        size: int,
        mapped: Sequence[bool],
        known: Sequence[Any],
        cotangents: Sequence[Any],
        summed: Sequence[bool] | None = None,
    ) -> list[Any] | None:
        """The gradients with the mapped axis in the op's own, chosen for again; None where that cannot be.

        Args:
          summed: which operands have a gradient for each example; the others' are summed over them. None if all have.
        """
        forward = self.forward
        axes, shapes = forward.pool_axes, forward.shapes
        folding = Folding.of(
            size, forward.request.op.folds, axes[: forward.operands], [x.shape for x in shapes[: forward.operands]]
        )
        of_moving = [axes[i] for i in self.moving]
        of_outputs = axes[forward.operands : forward.operands + forward.outputs]
        may_fold = OWN not in forward.wants and all(
            folding is not None and folding.has(x) for x in axes[forward.operands :]
        )
        if folding is None or not may_fold or any(map(varying, (*known, *cotangents))):
            return None
        is_own = [
            folding.has(x) and folding.own in (1, *_sizes(folding, x, shapes[i]))
            for x, i in zip(of_moving, self.moving, strict=True)
        ]
        if not all(
            own or (summed is not None and not each) for own, each in zip(is_own, summed or is_own, strict=True)
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
        if summed is None:
            return gradients
        adding = [own and not each for own, each in zip(is_own, summed, strict=True)]
        return [
            jnp.sum(x, axis=0).astype(x.dtype) if is_sum else x for is_sum, x in zip(adding, gradients, strict=True)
        ]

    def _again(self, folding: Folding) -> "Tangent | None":
        """The tangent of the folded call; None if it reads what this one does not."""
        forward = self.forward
        shapes = [folding.struct(of_one, x) for of_one, x in zip(forward.pool_axes, forward.shapes, strict=True)]
        request = forward.folded_request(folding)
        try:
            chosen = plan(request, shapes[: forward.operands], mapped=True)
        except UnsupportedOp:
            return None
        if not set(forward.wants) <= set(chosen.residuals) or isinstance(chosen.backward, UnsupportedOp):
            return None
        folded = dataclasses.replace(forward, request=request, plan=chosen, shapes=tuple(shapes))
        found = Tangent.trace(folded, shapes, self.moving)
        return found if set(found.used) <= set(self.used) else None


def _sizes(folding: Folding, axes: str | None, struct: Any) -> tuple[int, ...]:
    """How many entries an example has along the axis that grows."""
    if folding.into == "..." or not folding.has(axes):
        return (folding.own,)
    grown = folding.shape(axes, struct.shape)
    return tuple(size for size, larger in zip(struct.shape, grown, strict=True) if size != larger)


def _reference_tangent(forward: Forward, moving: Sequence[int]) -> _Function:
    request = forward.request

    def reference(*operands: Any) -> list[Any]:
        arguments = {**request.arrays(operands), **request.options}
        return jax.tree.leaves(request.op.reference(**arguments, wants=frozenset())[0])

    def tangent(operands: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        def of_moving(*some: Any) -> list[Any]:
            filled = list(operands)
            for place, operand in zip(moving, some, strict=True):
                filled[place] = operand
            return reference(*filled)

        with plain():
            return jax.jvp(of_moving, tuple(operands[i] for i in moving), tuple(moved))[1]

    return tangent


def _backward(forward: Forward, moving: Sequence[int]) -> _Function:
    """What was chosen backward, from the pool and the cotangents of the result to the gradients of some operands."""
    request, chosen = forward.request, forward.plan.backward
    assert not isinstance(chosen, UnsupportedOp) and chosen.implementation.backward is not None
    run = chosen.implementation.backward
    names = [name for name, array in request.arrays(range(forward.operands)).items() for _ in jax.tree.leaves(array)]
    wants = frozenset(names[i] for i in moving)

    def gradients(pool: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        arrays, outputs, residuals = forward.read(pool)
        of_result = jax.tree.unflatten(forward.structure, cotangents)
        found = run(arrays, request.options, outputs, residuals, of_result, wants=wants, **chosen.keywords)
        leaves: list[Any] = []
        for name, array in arrays.items():
            structure = jax.tree.structure(array)
            given = found.get(name) if structure.num_leaves else None
            leaves += [None] * structure.num_leaves if given is None else structure.flatten_up_to(given)
        of_moving = [(leaves[i], pool[i]) for i in moving]
        return [jnp.zeros_like(x) if gradient is None else gradient.astype(x.dtype) for gradient, x in of_moving]

    if chosen.split is None:
        return gradients
    split = chosen.split

    def split_gradients(pool: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        of_outputs = forward.pool_axes[forward.operands : forward.operands + forward.outputs]
        of_all = [of_one or "" for of_one in (*forward.pool_axes, *of_outputs)]
        results = [(forward.pool_axes[i] or "", forward.shapes[i].shape) for i in moving]

        def local(*arrays: Any) -> list[Any]:
            return gradients(arrays[: len(pool)], arrays[len(pool) :])

        found = split.run(local, (*pool, *cotangents), of_all, results)
        return [like(x, pool[i]) for x, i in zip(found, moving, strict=True)]

    return split_gradients


@dataclass(frozen=True, eq=False)
class _Pruned:
    """A function of (pool, more) that was traced, and what it reads of the pool."""

    jaxpr: Any
    used: tuple[int, ...]

    @classmethod
    def trace(cls, function: _Function, pool: Sequence[Any], more: Sequence[Any]) -> "_Pruned":
        with_consts = jax.make_jaxpr(lambda pool, more: tuple(function(pool, more)))(tuple(pool), tuple(more))
        inner = equations_of(with_consts)
        needs = [index >= len(pool) for index in range(len(inner.invars))]
        pruned, is_used = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), needs)
        closed = with_consts.replace(jaxpr=pruned) if inner is not with_consts else pruned
        return cls(closed, tuple(place for place in range(len(pool)) if is_used[place]))

    def reading(self, places: Sequence[int]) -> _Function:
        """The function of what is at these places of the pool, and of what is more."""
        own = [places.index(place) for place in self.used]

        def call(*arguments: Any) -> Sequence[Any]:
            return jaxpr_as_fun(self.jaxpr)(*(arguments[i] for i in own), *arguments[len(places) :])

        return call


def _in_axes(mapped: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(0 if is_mapped else None for is_mapped in mapped)


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
    types = jax.make_jaxpr(batched)(*moved).out_avals
    found = _tangent_p.bind(*moved, tangent=dataclasses.replace(batched, types=tuple(types)))
    return list(found), [0] * len(found)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tangent: Tangent) -> Any:
    return jax.jvp(tangent, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))


_tangent_p = Primitive("stack_tangent")
_tangent_p.multiple_results = True
_tangent_p.def_impl(lambda *arguments, tangent: jax.jit(tangent)(*arguments))
_tangent_p.def_abstract_eval(lambda *arguments, tangent: list(tangent.types))
ad.primitive_jvps[_tangent_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batch
mlir.register_lowering(
    _tangent_p,
    lambda context, *arguments, tangent: mlir.lower_fun(tangent, multiple_results=True)(context, *arguments),
)
