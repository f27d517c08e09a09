"""Chooses an implementation for each call of an op, forward and backward apart, while JAX traces.

Order of choice: what the caller named > the tuned tables > the `stack_select_op` hooks > the highest priority among the
implementations that support the call. A tie is an error. What was chosen is compiled in: nothing here runs in a
compiled step.

A named implementation is named for the forward pass. It also gives the gradient where it can. Where it cannot, another
is chosen as if none was named; a warning says so when the call is differentiated, unless that other was named as well.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax

from stack_core.abi import AUTODIFF, OpCall, OpImplementation, TunedChoice, supports_everything
from stack_core.errors import PluginError, UnsupportedOp
from stack_core.hardware.target_chip import target_chip
from stack_core.jit_context import JitContext
from stack_core.ops._manual_axes import vary_alike
from stack_core.ops._report import warn_once
from stack_core.ops._tuned import tuned_choices
from stack_core.plugins import plugins, registries

__all__ = [
    "Choice",
    "Implementation",
    "Plan",
    "described",
    "dispatch",
    "op_call",
    "plan",
    "recording",
    "run",
    "supporting",
]

Implementation: TypeAlias = str | OpImplementation | Sequence[str | OpImplementation] | None
"""What a caller may name: nothing, one implementation, or several in order of preference."""

recording: Final[JitContext[Callable[..., Any]]] = JitContext()
"""Stands in for `dispatch`, with its arguments, on what is traced in this context."""

_NO_BACKWARD = "has no backward pass of its own"


@dataclass(frozen=True)
class Choice:
    """One implementation and why it was chosen.

    Attributes:
      config: what it runs with; None if it has no configs.
      refused: the others that could not be chosen, each with its reason.
    """

    implementation: OpImplementation
    reason: str
    config: Any = None
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one call of an op gets in each direction.

    Attributes:
      backward: or what differentiating the call raises.
      unheeded: the name of what runs forward, if the caller named it and another implementation, that the caller did
        not name, gives the gradient though the named one has a backward pass too.
    """

    forward: Choice
    backward: Choice | UnsupportedOp
    unheeded: str | None = None


def dispatch(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], implementation: Implementation) -> Any:
    """Chooses and calls.

    Args:
      arrays: the array arguments by parameter name: arrays, pytrees of arrays, or None. Gradients flow to these only.
      options: the other arguments by parameter name, all static.
      implementation: what the caller named.

    Raises:
      UnknownName: a named implementation is not registered.
      UnsupportedOp: none of the named, or none at all, supports the call, or two do with the same priority. What only
        the backward pass lacks is raised when the call is differentiated.
    """
    recorder = recording.value
    if recorder is not None:
        return recorder(op, arrays, options, implementation)
    return run(plan(op, arrays, options, implementation), arrays, options)


def plan(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], implementation: Implementation = None) -> Plan:
    """What `dispatch` would choose for a call; reads shapes and dtypes only, and raises as `dispatch` does."""
    call = op_call(op, arrays, options)
    named = _named(op, implementation)
    candidates = _candidates(op) | {candidate.name: candidate for candidate in named}
    forward = _choose(call, candidates, named)
    try:
        backward = _choose(dataclasses.replace(call, direction="backward"), candidates, named, forward)
    except UnsupportedOp as error:
        return Plan(forward, error)
    return Plan(forward, backward, _unheeded(named, forward, backward))


def op_call(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> OpCall:
    """The forward pass of a call, without the values of its arrays."""
    return OpCall(op, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(arrays)), options)


def _named(op: str, implementation: Implementation) -> list[OpImplementation]:
    if implementation is None:
        return []
    names = [implementation] if isinstance(implementation, str | OpImplementation) else list(implementation)
    return [name if isinstance(name, OpImplementation) else _registered(f"{op}/{name}") for name in names]


def supporting(call: OpCall) -> dict[str, OpImplementation]:
    """The registered implementations that support one direction of a call on the target chip, by name."""
    return {name: found for name, found in _candidates(call.op).items() if _answer(found, call) is True}


def _candidates(op: str) -> dict[str, OpImplementation]:
    found: dict[str, OpImplementation] = {}
    for name in registries.ops.names():
        if not name.startswith(f"{op}/"):
            continue
        try:
            found[name.removeprefix(f"{op}/")] = _registered(name)
        except PluginError as error:
            warn_once(name, message=f"{error} Calls go to other implementations.")
    return found


def _registered(name: str) -> OpImplementation:
    found = registries.ops[name]
    if not isinstance(found, OpImplementation) or f"{found.op}/{found.name}" != name:
        raise PluginError(
            f"ops {name!r} is registered as {found!r}; expected an OpImplementation of that op and that name. "
            "`stack plugins` says whose it is."
        )
    return found


def _unheeded(named: Sequence[OpImplementation], forward: Choice, backward: Choice) -> str | None:
    if not named or forward.implementation.vjp is None or backward.implementation in named:
        return None
    return forward.implementation.name


def _choose(
    call: OpCall,
    candidates: Mapping[str, OpImplementation],
    named: Sequence[OpImplementation],
    forward: Choice | None = None,
) -> Choice:
    """Chooses for one direction.

    Args:
      forward: what the forward pass got, when this is the backward pass.
    """
    answers = {name: _answer(candidate, call) for name, candidate in candidates.items()}
    able = {name: candidates[name] for name, answer in answers.items() if answer is True}
    wanted = next((candidate for candidate in named if candidate.name in able), None)
    if not able or (named and wanted is None and forward is None):
        raise UnsupportedOp(_refusals(call, answers, named if forward is None else ()))
    ran = None if forward is None else TunedChoice(forward.implementation.name, forward.config, forward.reason)
    tuned = tuned_choices(call, candidates, answers, wanted, ran)
    if wanted is not None:
        choice = _named_choice(wanted, tuned)
    else:
        choice = _tuned_choice(able, tuned) or _selected_by_hook(call, able) or _highest_priority(call, able, forward)
    if forward is not None:
        choice = _sharing_config(choice, forward)
    refused = tuple((name, _reason(answer)) for name, answer in sorted(answers.items()) if answer is not True)
    return dataclasses.replace(choice, refused=refused)


def _answer(candidate: OpImplementation, call: OpCall) -> bool | str:
    if call.direction == "backward" and candidate.vjp is None:
        return _NO_BACKWARD
    # A CPU's chip is measured when it is first asked for: only a `supports` that may look at it is worth that.
    if candidate.supports is supports_everything:
        return True
    chip = target_chip()
    try:
        return candidate.supports(call, chip)
    except Exception as error:  # `supports` may fail in any way; that must stop no other implementation.
        problem = f"its `supports` raised {type(error).__name__}: {error}"
        warn_once(call.op, candidate.name, message=f"{call.op}/{candidate.name} is passed over: {problem}")
        return problem


def _named_choice(wanted: OpImplementation, tuned: Mapping[str, TunedChoice]) -> Choice:
    for table, advice in tuned.items():
        if advice.implementation == wanted.name:
            reason = f"named by the caller; config of tuned table {table!r}: {advice.reason}"
            return _choice(wanted, reason, advice.config)
    return _choice(wanted, "named by the caller")


def _tuned_choice(able: Mapping[str, OpImplementation], tuned: Mapping[str, TunedChoice]) -> Choice | None:
    for table, advice in tuned.items():
        return _choice(able[advice.implementation], f"tuned table {table!r}: {advice.reason}", advice.config)
    return None


def _choice(implementation: OpImplementation, reason: str, config: Any = None) -> Choice:
    if config is None and implementation.configs:
        config = implementation.configs[0]
    return Choice(implementation, reason, config)


def _sharing_config(backward: Choice, forward: Choice) -> Choice:
    """What JAX differentiates is one function in both directions, so that it has one config."""
    implementation = backward.implementation
    if implementation is not forward.implementation or implementation.vjp != AUTODIFF:
        return backward
    if backward.config == forward.config:
        return backward
    return Choice(implementation, f"{backward.reason}; with the forward's config, as autodiff must", forward.config)


def _selected_by_hook(call: OpCall, able: Mapping[str, OpImplementation]) -> Choice | None:
    if len(able) < 2:
        return None
    answer = plugins.select_op(call=call, chip=target_chip(), candidates=tuple(able))
    if answer is None:
        return None
    if answer not in able:
        raise PluginError(
            f"stack_select_op chose {answer!r} for {call.op} {call.direction}; expected one of {tuple(able)}."
        )
    return _choice(able[answer], "chosen by stack_select_op")


def _highest_priority(call: OpCall, able: Mapping[str, OpImplementation], forward: Choice | None) -> Choice:
    if len(able) == 1:
        return _choice(*able.values(), reason="the only one that supports the call")
    top = max(candidate.priority for candidate in able.values())
    best = [candidate for candidate in able.values() if candidate.priority == top]
    if forward is not None and forward.implementation in best:
        return _choice(forward.implementation, f"priority {top}, the forward's own")
    if len(best) > 1:
        names = " and ".join(repr(candidate.name) for candidate in best)
        raise UnsupportedOp(
            f"{call.op} {call.direction}: {names} support the call with the same priority {top}. "
            f"Name one: {call.op}(..., implementation={best[0].name!r})."
        )
    return _choice(best[0], f"priority {top}")


def _refusals(call: OpCall, answers: Mapping[str, bool | str], named: Sequence[OpImplementation]) -> str:
    what = call.op if call.direction == "forward" else f"{call.op} {call.direction}"
    wanted = " or ".join(repr(candidate.name) for candidate in named)
    head = f"{what}: {wanted} cannot run this call." if named else f"{what}: no implementation supports this call."
    shapes = ", ".join(f"{name} {described(struct)}" for name, struct in call.arrays.items() if struct is not None)
    lines = [f"  {name}: {_reason(answer)}" for name, answer in sorted(answers.items())]
    able = [name for name, answer in answers.items() if answer is True]
    remedy = f"Name one that supports it ({', '.join(sorted(able))}) or none." if able else "Change the call."
    return "\n".join([head, f"The call: {shapes}.", "Implementations:", *lines, remedy])


def _reason(answer: bool | str) -> str:
    if answer is True:
        return "supports the call"
    return answer if isinstance(answer, str) else "refused without a reason"


def described(struct: Any) -> str:
    """The dtype and shape of an argument, or those of each of its leaves: "float32[2, 3]"."""
    return " ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(struct))


def run(chosen: Plan, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Calls what was chosen, to be differentiated by the backward that was chosen."""
    forward = chosen.forward
    if _is_one_function(forward, chosen.backward):
        return _call(forward, arrays, options)

    @jax.custom_vjp
    def call(arrays: dict[str, Any]) -> Any:
        return _call(forward, arrays, options)

    def call_forward(arrays: dict[str, Any]) -> Any:
        needs_output = callable(_backward(chosen).implementation.vjp)
        output = _call(forward, arrays, options)
        return output, (arrays, output if needs_output else None)

    def call_backward(residuals: Any, cotangent: Any) -> Any:
        arrays, output = residuals
        return (_gradients(_backward(chosen), arrays, options, output, cotangent),)

    call.defvjp(call_forward, call_backward)
    return call(vary_alike(dict(arrays))[0])


def _is_one_function(forward: Choice, backward: Choice | UnsupportedOp) -> bool:
    """Whether JAX alone gives the gradient of what runs forward."""
    if isinstance(backward, UnsupportedOp):
        return False
    return forward.implementation is backward.implementation and forward.implementation.vjp == AUTODIFF


def _backward(chosen: Plan) -> Choice:
    """The backward of a call that is being differentiated."""
    if isinstance(chosen.backward, UnsupportedOp):
        raise UnsupportedOp(str(chosen.backward))
    if chosen.unheeded is not None:
        op, instead = chosen.forward.implementation.op, chosen.backward.implementation.name
        reason = dict(chosen.backward.refused).get(chosen.unheeded)
        warn_once(
            op,
            chosen.unheeded,
            "backward",
            message=f"{op}: {chosen.unheeded!r} was named and runs forward, but not backward: {reason}. {instead!r} "
            f"gives the gradient. If that is wanted, name it too: implementation=[{chosen.unheeded!r}, {instead!r}].",
        )
    return chosen.backward


def _gradients(
    backward: Choice, arrays: dict[str, Any], options: Mapping[str, Any], output: Any, cotangent: Any
) -> dict[str, Any]:
    vjp = backward.implementation.vjp
    if callable(vjp):
        gradients = vjp(arrays, options, output, cotangent, **_config(backward))
        return {name: gradients.get(name) for name in arrays}
    _, recomputed_vjp = jax.vjp(lambda arrays: _call(backward, arrays, options), arrays)
    return recomputed_vjp(cotangent)[0]


def _call(choice: Choice, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    return choice.implementation.function(**arrays, **options, **_config(choice))


def _config(choice: Choice) -> dict[str, Any]:
    return {"config": choice.config} if choice.implementation.configs else {}
