"""Chooses an implementation for each call of an op, forward and backward apart, while JAX traces.

Order of choice: what the caller named > the `stack_select_op` hooks > the highest priority among the implementations
that support the call. A tie is an error. What was chosen is compiled in: nothing here runs in a compiled step.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from stack_core.abi import AUTODIFF, OpCall, OpImplementation, supports_everything
from stack_core.errors import PluginError, UnsupportedOp
from stack_core.hardware.chips import Chip, current_chip
from stack_core.plugins import plugins, registries

__all__ = ["Choice", "Implementation", "Plan", "dispatch", "plan"]

Implementation: TypeAlias = str | OpImplementation | Sequence[str | OpImplementation] | None
"""What a caller may name: nothing, one implementation, or several in order of preference."""


@dataclass(frozen=True)
class Choice:
    """One implementation and why it was chosen."""

    implementation: OpImplementation
    reason: str


@dataclass(frozen=True)
class Plan:
    """What one call of an op gets in each direction."""

    forward: Choice
    backward: Choice


def dispatch(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], implementation: Implementation) -> Any:
    """Chooses and calls.

    Args:
      arrays: the array arguments by parameter name: arrays, pytrees of arrays, or None. Gradients flow to these only.
      options: the other arguments by parameter name, all static.
      implementation: what the caller named.

    Raises:
      UnknownName: a named implementation is not registered.
      UnsupportedOp: none of the named, or none at all, supports the call, or two do with the same priority.
    """
    return _run(plan(op, arrays, options, implementation), dict(arrays), dict(options))


def plan(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], implementation: Implementation = None) -> Plan:
    """What `dispatch` would choose for a call; reads shapes and dtypes only, and raises as `dispatch` does."""
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(arrays))
    named = _named(op, implementation)
    candidates = _candidates(op) | {candidate.name: candidate for candidate in named}
    forward = _choose_forward(OpCall(op, structs, options, "forward"), candidates, named)
    backward = _choose_backward(OpCall(op, structs, options, "backward"), candidates, named, forward)
    return Plan(forward, backward)


def _named(op: str, implementation: Implementation) -> list[OpImplementation]:
    if implementation is None:
        return []
    names = [implementation] if isinstance(implementation, str | OpImplementation) else list(implementation)
    return [name if isinstance(name, OpImplementation) else registries.ops[f"{op}/{name}"] for name in names]


def _candidates(op: str) -> dict[str, OpImplementation]:
    found: dict[str, OpImplementation] = {}
    for name in registries.ops.names():
        if not name.startswith(f"{op}/"):
            continue
        try:
            found[name.removeprefix(f"{op}/")] = registries.ops[name]
        except PluginError as error:
            warnings.warn(f"{error} The call goes to another implementation.", RuntimeWarning, stacklevel=2)
    return found


def _supports(candidate: OpImplementation, call: OpCall) -> bool | str:
    # A CPU's chip is measured when it is first asked for: only a `supports` that may look at it is worth that.
    return candidate.supports is supports_everything or candidate.supports(call, _target_chip())


def _target_chip() -> Chip:
    with jax.ensure_compile_time_eval():  # The measurement must run, not become part of the program that is traced.
        return current_chip()


def _choose_forward(
    call: OpCall, candidates: Mapping[str, OpImplementation], named: Sequence[OpImplementation]
) -> Choice:
    answers = {name: _supports(candidate, call) for name, candidate in candidates.items()}
    able = {name: candidates[name] for name, answer in answers.items() if answer is True}
    for candidate in named:
        if candidate.name in able:
            return Choice(candidate, "named by the caller")
    if named or not able:
        raise UnsupportedOp(_refusals(call, answers, named))
    return _selected_by_hook(call, able) or _highest_priority(call, able)


def _choose_backward(
    call: OpCall, candidates: Mapping[str, OpImplementation], named: Sequence[OpImplementation], forward: Choice
) -> Choice:
    """Chooses among those that have a backward of their own; the reference always has."""
    able = {
        name: candidate
        for name, candidate in candidates.items()
        if candidate.vjp is not None and _supports(candidate, call) is True
    }
    for candidate in named:
        if candidate.name in able:
            return Choice(candidate, "named by the caller")
    return _selected_by_hook(call, able) or _highest_priority(call, able, prefer=forward.implementation)


def _selected_by_hook(call: OpCall, able: Mapping[str, OpImplementation]) -> Choice | None:
    if len(able) < 2:
        return None
    answer = plugins.select_op(call=call, chip=_target_chip(), candidates=tuple(able))
    if answer is None:
        return None
    if answer not in able:
        raise PluginError(
            f"stack_select_op chose {answer!r} for {call.op} {call.direction}; expected one of {tuple(able)}."
        )
    return Choice(able[answer], "chosen by stack_select_op")


def _highest_priority(
    call: OpCall, able: Mapping[str, OpImplementation], prefer: OpImplementation | None = None
) -> Choice:
    top = max(candidate.priority for candidate in able.values())
    best = [candidate for candidate in able.values() if candidate.priority == top]
    if prefer is not None and prefer in best:
        return Choice(prefer, f"priority {top}, the forward's own")
    if len(best) > 1:
        names = " and ".join(repr(candidate.name) for candidate in best)
        raise UnsupportedOp(
            f"{call.op} {call.direction}: {names} support the call with the same priority {top}. "
            f"Name one: {call.op}(..., implementation={best[0].name!r})."
        )
    return Choice(best[0], f"priority {top}")


def _refusals(call: OpCall, answers: Mapping[str, bool | str], named: Sequence[OpImplementation]) -> str:
    wanted = " or ".join(repr(candidate.name) for candidate in named)
    head = (
        f"{call.op}: {wanted} cannot run this call." if named else f"{call.op}: no implementation supports this call."
    )
    shapes = ", ".join(f"{name} {_described(struct)}" for name, struct in call.arrays.items() if struct is not None)
    lines = [f"  {name}: {_reason(answer)}" for name, answer in sorted(answers.items())]
    able = [name for name, answer in answers.items() if answer is True]
    remedy = f"Name one that supports it ({', '.join(sorted(able))}) or none." if able else "Change the call."
    return "\n".join([head, f"The call: {shapes}.", "Implementations:", *lines, remedy])


def _reason(answer: bool | str) -> str:
    if answer is True:
        return "supports the call"
    return answer if isinstance(answer, str) else "refused without a reason"


def _described(struct: Any) -> str:
    return " ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(struct))


def _run(chosen: Plan, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    forward, backward = chosen.forward.implementation, chosen.backward.implementation
    if forward is backward and forward.vjp == AUTODIFF:
        return _call(forward, arrays, options)

    @jax.custom_vjp
    def run(arrays: dict[str, Any]) -> Any:
        return _call(forward, arrays, options)

    def run_forward(arrays: dict[str, Any]) -> Any:
        output = _call(forward, arrays, options)
        return output, (arrays, output if callable(backward.vjp) else None)

    def run_backward(residuals: Any, cotangent: Any) -> Any:
        arrays, output = residuals
        if callable(backward.vjp):
            gradients = backward.vjp(arrays, options, output, cotangent)
            return ({name: gradients.get(name) for name in arrays},)
        _, recomputed_vjp = jax.vjp(lambda arrays: _call(backward, arrays, options), arrays)
        return recomputed_vjp(cotangent)

    run.defvjp(run_forward, run_backward)
    return run(arrays)


def _call(implementation: OpImplementation, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    config = {"config": implementation.configs[0]} if implementation.configs else {}
    return implementation.function(**arrays, **options, **config)
