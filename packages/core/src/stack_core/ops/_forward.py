"""The forward pass of a call, as what was chosen for it, under `jax.vmap` and on a mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

from stack_core.abi import OWN, OpCall
from stack_core.errors import UnsupportedOp
from stack_core.jaxprs import equations_of
from stack_core.ops._choosing import Choice, Plan, Request, plan
from stack_core.ops._chosen import note_choice
from stack_core.ops._folding import Folding
from stack_core.ops._op import OpAxes

__all__ = ["Forward"]


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward pass that was traced.

    All arrays of a call are its *pool*: the operands, the leaves of the result, and the residuals that are neither.

    Attributes:
      wants: the names of the residuals that it returns.
      jaxpr: from the operands to the leaves of the result and of the residuals.
      structure: of the result.
      residuals: the structure of the mapping of residuals.
      places: where in the pool each leaf of the residuals is.
      returned: the leaves of the result and the residuals that are not in the pool yet, among those of the jaxpr.
      shapes: of the pool.
      pool_axes: of the pool; None for a part of a quantized array, and for what an implementation keeps for itself.
    """

    request: Request
    plan: Plan
    wants: tuple[str, ...]
    jaxpr: Any
    structure: Any
    residuals: Any
    places: tuple[int, ...]
    returned: tuple[int, ...]
    shapes: tuple[Any, ...]
    pool_axes: tuple[str | None, ...]

    @classmethod
    def trace(cls, request: Request, operands: Sequence[Any], *, wants: bool, mapped: bool = False) -> "Forward":
        """Chooses, and traces what was chosen.

        Args:
          wants: whether a gradient follows, which reads residuals.
          mapped: see `plan`.

        Raises:
          UnsupportedOp: see `plan`.
        """
        chosen = plan(request, operands, mapped=mapped)
        if request.noted is None:
            _note(chosen, request.call(operands))
        wanted = tuple(sorted(chosen.residuals)) if wants else ()
        axes = request.op.axes(request.call(operands))
        results = jax.make_jaxpr(_local(request, chosen, wanted, axes), return_shape=True)(*operands)
        jaxpr, (outputs, residuals) = results
        leaves, structure = jax.tree.flatten(outputs)
        inner = equations_of(jaxpr)
        pool: list[Any] = [*inner.invars, *inner.outvars[: len(leaves)]]
        places: list[int] = []
        returned = list(range(len(leaves)))
        for number, variable in enumerate(inner.outvars[len(leaves) :], len(leaves)):
            at = next((place for place, other in enumerate(pool) if other is variable), None)
            if at is None:
                at = len(pool)
                pool.append(variable)
                returned.append(number)
            places.append(at)
        kept = _residual_axes(axes, residuals)
        of_pool = [
            *axes.of_leaves(request.arrays(operands)),
            *axes.outputs,
            *(kept[at - len(leaves)] for at in returned[len(leaves) :]),
        ]
        return cls(
            request=request,
            plan=chosen,
            wants=wanted,
            jaxpr=jaxpr,
            structure=structure,
            residuals=jax.tree.structure(residuals),
            places=tuple(places),
            returned=tuple(returned),
            shapes=tuple(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in pool),
            pool_axes=tuple(of_pool),
        )

    @property
    def operands(self) -> int:
        """The number of operands."""
        return len(equations_of(self.jaxpr).invars)

    @property
    def outputs(self) -> int:
        """The number of leaves of the result."""
        return self.structure.num_leaves

    def read(self, pool: Sequence[Any]) -> tuple[dict[str, Any], Any, Mapping[str, Any]]:
        """The arrays, the result and the residuals."""
        outputs = pool[self.operands : self.operands + self.outputs]
        residuals = jax.tree.unflatten(self.residuals, [pool[place] for place in self.places])
        return self.request.arrays(pool[: self.operands]), jax.tree.unflatten(self.structure, outputs), residuals

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """The rest of the pool: the leaves of the result, then the residuals."""
        run = custom_vmap(self._run)

        @run.def_vmap
        def _(size: int, mapped: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
            found = self._folded(size, mapped, operands)
            if found is None:
                found = jax.vmap(self._run, in_axes=tuple(0 if is_mapped else None for is_mapped in mapped))(*operands)
            return tuple(found), (True,) * len(found)

        return tuple(run(*operands))

    def _run(self, *operands: Any) -> tuple[Any, ...]:
        results = jaxpr_as_fun(self.jaxpr)(*operands)
        return tuple(results[number] for number in self.returned)

    def folded_request(self, folding: Folding) -> Request:
        """The request for the folded call: along the mapped axis nothing is split."""
        request = self.request
        if request.axes is None:
            return request
        of_operands = request.op.axes(request.call(self.shapes[: self.operands])).operands
        axes = {name: folding.names(of_operands.get(name), names) for name, names in request.axes.items()}
        return dataclasses.replace(request, axes=axes)

    def _folded(self, size: int, mapped: Sequence[bool], operands: Sequence[Any]) -> list[Any] | None:
        """The call with the mapped axis in the op's own, chosen for again; None where that cannot be."""
        axes = self.pool_axes[: self.operands]
        folding = Folding.of(size, self.request.op.folds, axes, [x.shape for x in self.shapes[: self.operands]])
        if folding is None or OWN in self.wants or not all(map(folding.has, self.pool_axes[self.operands :])):
            return None
        folded = folding.fold_all(axes, operands, mapped)
        if folded is None:
            return None
        try:
            again = Forward.trace(self.folded_request(folding), folded, wants=bool(self.wants), mapped=True)
        except UnsupportedOp:  # A named implementation may take one example, and not all at once.
            return None
        if not set(self.wants) <= set(again.wants):
            return None
        pool = (*folded, *again(*folded))
        _, outputs, residuals = again.read(pool)
        leaves = [*jax.tree.leaves(outputs), *jax.tree.leaves({name: residuals[name] for name in self.wants})]
        returned = [leaves[number] for number in self.returned]
        of_returned = self.pool_axes[self.operands :]
        return [folding.unfold(of_one or "", x) for of_one, x in zip(of_returned, returned, strict=True)]


def _note(chosen: Plan, call: OpCall) -> None:
    note_choice(call, chosen.forward.implementation.name, chosen.forward.config, chosen.forward.reason)
    if isinstance(chosen.backward, Choice):
        backward = dataclasses.replace(call, direction="backward")
        note_choice(backward, chosen.backward.implementation.name, chosen.backward.config, chosen.backward.reason)


def _local(request: Request, chosen: Plan, wants: tuple[str, ...], axes: OpAxes) -> Any:
    """What was chosen, from the operands to (result, residuals), run by each device on its part if need be."""
    forward = chosen.forward
    structure: list[Any] = []

    def call(*operands: Any) -> tuple[Any, Any]:
        arguments = {**request.arrays(operands), **request.options, **forward.keywords}
        outputs, residuals = forward.implementation.forward(**arguments, wants=frozenset(wants))
        return outputs, {name: residuals[name] for name in wants}

    def call_flat(*operands: Any) -> list[Any]:
        leaves, found = jax.tree.flatten(call(*operands))
        structure[:] = [found]
        return leaves

    def split(*operands: Any) -> tuple[Any, Any]:
        assert forward.split is not None, "not split"
        of_operands = [of_one or "" for of_one in axes.of_leaves(request.arrays(operands))]
        results = [*axes.outputs, *(axes.residuals[name] for name in wants)]
        leaves = forward.split.run(call_flat, operands, of_operands, [(of_one, None) for of_one in results])
        return jax.tree.unflatten(structure[0], leaves)

    return call if forward.split is None else split


def _residual_axes(axes: OpAxes, residuals: Mapping[str, Any]) -> list[str | None]:
    found: list[str | None] = []
    for name in sorted(residuals):
        found += [axes.residuals.get(name)] * len(jax.tree.leaves(residuals[name]))
    return found
