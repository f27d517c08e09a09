"""Forward passes of calls with the chosen implementation, including `jax.vmap` and meshes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import partial_eval

from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.ops import OWN, OpCall
from stack_core.ops.dispatch.choosing import Choice, Plan, plan
from stack_core.ops.dispatch.chosen import choice_entry, note_choices
from stack_core.ops.dispatch.folding import Folding
from stack_core.ops.dispatch.op import OpAxes
from stack_core.ops.dispatch.request import Request
from stack_core.ops.dispatch.traced import Static, traced
from stack_core.programs.jaxprs import equations_of

__all__ = ["Forward"]


@dataclass(frozen=True, eq=False)
class Forward:
    """Traced forward pass of a call.

    The *pool* of a call consists of the operands, the leaves of the result, and all residuals that are not among these.

    Attributes:
      request: the call.
      plan: chosen implementations.
      residual_names: names of the returned residuals.
      jaxpr: jaxpr from the operands to the leaves of the result and of the residuals.
      structure: pytree structure of the result.
      residuals: pytree structure of the mapping of residuals.
      places: pool index of each leaf of the residuals.
      returned: indices of the jaxpr's outputs that the pool contains: the leaves of the result and the new residuals.
      shapes: shapes and dtypes of the pool.
      pool_axes: axes of the pool; None for leaves of quantized arrays and for private residuals (`OWN`).
      notes: entries of `ops.choices`, by key.
    """

    request: Request
    plan: Plan
    residual_names: tuple[str, ...]
    jaxpr: Any
    structure: Any
    residuals: Any
    places: tuple[int, ...]
    returned: tuple[int, ...]
    shapes: tuple[Any, ...]
    pool_axes: tuple[str | None, ...]
    notes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def trace(
        cls, request: Request, operands: Sequence[Any], *, needs_residuals: bool, mapped: bool = False
    ) -> "Forward":
        """Chooses implementations for a call and traces its forward pass.

        Args:
          needs_residuals: whether to return residuals for a gradient.
          mapped: see `plan`.

        Raises:
          UnsupportedOp: see `plan`.
        """
        found = traced(_chosen, request, needs_residuals, mapped, operands=operands, is_shared=request.is_shared)
        # A shared request gives one Forward for equal calls, and thus one jaxpr that JAX lowers once.
        make = _shared if request.is_shared else cls.of
        forward = make(request, found.jaxpr, found.out_tree)
        if request.noted is None:
            note_choices(forward.notes)
        return forward

    @classmethod
    def of(cls, request: Request, jaxpr: Any, structure: Any) -> "Forward":
        """Builds a forward pass from the jaxpr and the result structure of `_chosen`."""
        outvars = equations_of(jaxpr).outvars
        outputs, residuals, static = jax.tree.unflatten(structure, outvars)
        chosen, residual_names, axes = static.value
        leaves, structure = jax.tree.flatten(outputs)
        inner = equations_of(jaxpr)
        pool: list[Any] = [*inner.invars, *inner.outvars[: len(leaves)]]
        places: list[int] = []
        returned = list(range(len(leaves)))
        for number, variable in enumerate(inner.outvars[len(leaves) :], len(leaves)):
            # A residual that is an operand or a result, as the output of attention, is in the pool once.
            at = next((place for place, other in enumerate(pool) if other is variable), None)
            if at is None:
                at = len(pool)
                pool.append(variable)
                returned.append(number)
            places.append(at)
        residual_axes = _residual_axes(axes, residuals)
        of_pool = [
            *axes.of_leaves(request.arrays(inner.invars)),
            *axes.outputs,
            *(residual_axes[at - len(leaves)] for at in returned[len(leaves) :]),
        ]
        return cls(
            request=request,
            plan=chosen,
            residual_names=residual_names,
            jaxpr=jaxpr,
            structure=structure,
            residuals=jax.tree.structure(residuals),
            places=tuple(places),
            returned=tuple(returned),
            shapes=tuple(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in pool),
            pool_axes=tuple(of_pool),
            notes=_notes(chosen, request.call([x.aval for x in inner.invars])),
        )

    @property
    def operands(self) -> int:
        """Number of operands."""
        return len(equations_of(self.jaxpr).invars)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Parameter name of each operand."""
        arrays = self.request.arrays(range(self.operands))
        return tuple(name for name, array in arrays.items() for _ in jax.tree.leaves(array))

    @property
    def outputs(self) -> int:
        """Number of leaves of the result."""
        return self.structure.num_leaves

    def read(self, pool: Sequence[Any]) -> tuple[dict[str, Any], Any, Mapping[str, Any]]:
        """Returns arrays, result and residuals from the pool."""
        outputs = pool[self.operands : self.operands + self.outputs]
        residuals = jax.tree.unflatten(self.residuals, [pool[place] for place in self.places])
        return self.request.arrays(pool[: self.operands]), jax.tree.unflatten(self.structure, outputs), residuals

    @functools.cached_property
    def program(self) -> Any:
        """Jaxpr from the operands to the rest of the pool: the leaves of the result, then the residuals."""
        inner = equations_of(self.jaxpr)
        is_returned = [number in self.returned for number in range(len(inner.outvars))]
        # Without the outputs that the pool already contains; their computation goes if nothing else needs it.
        rest, _ = partial_eval.dce_jaxpr(inner, is_returned, instantiate=True)
        return self.jaxpr.replace(jaxpr=rest) if inner is not self.jaxpr else rest

    def folded_request(self, folding: Folding) -> Request:
        """Returns the request for the folded call, which is not split along the folded axis."""
        request = self.request
        if request.axes is None:
            return request
        of_operands = request.op.axes(request.call(self.shapes[: self.operands])).operands
        axes = {name: folding.names(of_operands.get(name), names) for name, names in request.axes.items()}
        return request.replaced(axes=axes)

    def folded(
        self,
        size: int,
        mapped: Sequence[bool],
        operands: Sequence[Any],
        run: Callable[["Forward", Sequence[Any]], Sequence[Any]],
    ) -> list[Any] | None:
        """Chooses again for the folded call and runs it; returns None if the call cannot be folded."""
        axes = self.pool_axes[: self.operands]
        folding = Folding.of(size, self.request.op.folds, axes, [x.shape for x in self.shapes[: self.operands]])
        # Private residuals have unknown axes, so they cannot be folded or unfolded.
        if folding is None or OWN in self.residual_names or not all(map(folding.has, self.pool_axes[self.operands :])):
            return None
        folded = folding.fold_all(axes, operands, mapped)
        if folded is None:
            return None
        try:
            again = Forward.trace(
                self.folded_request(folding), folded, needs_residuals=bool(self.residual_names), mapped=True
            )
        except UnsupportedOp:  # A requested implementation may support one example but not the folded call.
            return None
        # The implementation of the folded call may not provide the residuals that the backward pass was traced with.
        if not set(self.residual_names) <= set(again.residual_names):
            return None
        _, outputs, residuals = again.read((*folded, *run(again, folded)))
        # Results and residuals in the order of the jaxpr of one example, to select what it returns.
        leaves = [*jax.tree.leaves(outputs), *jax.tree.leaves({name: residuals[name] for name in self.residual_names})]
        returned = [leaves[number] for number in self.returned]
        of_returned = self.pool_axes[self.operands :]
        return [folding.unfold(of_one or "", x) for of_one, x in zip(of_returned, returned, strict=True)]


_shared = functools.lru_cache(maxsize=8192)(Forward.of)


def _notes(chosen: Plan, call: OpCall) -> dict[str, Mapping[str, Any]]:
    found = {"forward": chosen.forward, "backward": chosen.backward}
    entries = [
        choice_entry(
            dataclasses.replace(call, direction=direction), choice.implementation.name, choice.config, choice.reason
        )
        for direction, choice in found.items()
        if isinstance(choice, Choice)
    ]
    return dict(entries)


def _chosen(request: Request, needs_residuals: bool, mapped: bool) -> Any:
    """Returns a function of the operands that chooses and runs: it returns result, residuals and the choice."""

    def call(*operands: Any) -> tuple[Any, Any, Static]:
        chosen = plan(request, operands, mapped=mapped)
        residual_names = tuple(sorted(chosen.residuals)) if needs_residuals else ()
        axes = request.op.axes(request.call(operands))
        return *_local(request, chosen, residual_names, axes)(*operands), Static((chosen, residual_names, axes))

    return call


def _local(request: Request, chosen: Plan, residual_names: tuple[str, ...], axes: OpAxes) -> Any:
    """Returns the chosen forward pass, from operands to (result, residuals), sharded over devices if necessary."""
    forward = chosen.forward
    structure: list[Any] = []

    def call(*operands: Any) -> tuple[Any, Any]:
        arguments = {**request.arrays(operands), **request.options, **forward.keywords}
        outputs, residuals = forward.implementation.forward(**arguments, requested=frozenset(residual_names))
        return outputs, {name: residuals[name] for name in residual_names}

    def call_flat(*operands: Any) -> list[Any]:
        leaves, found = jax.tree.flatten(call(*operands))
        # shard_map passes flat leaves only; the structure is known once the function has been traced.
        structure[:] = [found]
        return leaves

    def split(*operands: Any) -> tuple[Any, Any]:
        assert forward.split is not None, "not split"
        of_operands = [of_one or "" for of_one in axes.of_leaves(request.arrays(operands))]
        results = [*axes.outputs, *(axes.residuals[name] for name in residual_names)]
        leaves = forward.split.run(call_flat, operands, of_operands, [(of_one, None) for of_one in results])
        return jax.tree.unflatten(structure[0], leaves)

    return call if forward.split is None else split


def _residual_axes(axes: OpAxes, residuals: Mapping[str, Any]) -> list[str | None]:
    found: list[str | None] = []
    for name in sorted(residuals):
        found += [axes.residuals.get(name)] * len(jax.tree.leaves(residuals[name]))
    return found
