"""Choice of an implementation for each op call at trace time, separately for the forward and backward pass.

Order of precedence: implementations requested by the caller > tuned tables > `stack_select_op` hooks > implementations
not preceded (`before`) by another supported implementation > highest priority > first installed. The choice is
compiled in: nothing in this module runs in a compiled step.

Calls with an empty operand, such as an empty batch, use the reference, so kernels need not handle empty arrays.

A requested implementation applies to the forward pass, and to the backward pass if it supports the call there.
Otherwise another backward pass is chosen as usual, with a warning when the call is differentiated unless the caller
requested that implementation as well.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from stack_core.abi.errors import PluginError, UnsupportedOp
from stack_core.abi.ops import OWN, OpCall, OpImplementation, TunedChoice, supports_everything
from stack_core.abi.plugins import plugins
from stack_core.chips.context import target_chip, target_platform
from stack_core.chips.jit_context import JitContext
from stack_core.ops.dispatch.implementations import implementations_of, named_implementations, preferred
from stack_core.ops.dispatch.op import op_named
from stack_core.ops.dispatch.report import warn_once
from stack_core.ops.dispatch.request import Request
from stack_core.ops.dispatch.splitting import Split, free_devices, split_of
from stack_core.ops.dispatch.symbolic import has_symbolic_size, is_symbolic
from stack_core.ops.dispatch.tuned import tuned_choices
from stack_core.programs.flops import references_only

__all__ = [
    "Choice",
    "Plan",
    "answer",
    "choose",
    "for_export",
    "format_shapes",
    "highest_priority",
    "plan",
    "supporting",
]

exporting: Final[JitContext[bool]] = JitContext()


def for_export() -> contextlib.AbstractContextManager[None]:
    """Restricts calls traced in this context to implementations that `jax.export` can serialize."""
    return exporting(True)


_NO_BACKWARD = "has no backward pass of its own"
_EMPTY = "the call is empty: core answers it"
_COUNTED = "only references are allowed here"


@dataclass(frozen=True)
class Choice:
    """Chosen implementation with the reason.

    Attributes:
      implementation: the implementation.
      reason: reason of the choice.
      config: config of the implementation; None for implementations without configs.
      refused: names of unsupported implementations, each with the reason.
      split: sharding of the call over the devices of a mesh if XLA cannot partition the implementation; else None.
    """

    implementation: OpImplementation
    reason: str
    config: Any = None
    refused: tuple[tuple[str, str], ...] = ()
    split: Split | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the implementation in addition to the call."""
        return {} if self.implementation.default is None else {"config": self.config}


@dataclass(frozen=True)
class Plan:
    """Choices for both directions of a call.

    Attributes:
      forward: choice for the forward pass.
      backward: choice for the backward pass, or the error to raise if the call is differentiated.
      residuals: names of the residuals that the forward pass passes to the backward pass.
      unheeded: name of a requested implementation that has a backward pass but does not run it, because it does not
        support the call there and the caller did not request the replacement; else None.
    """

    forward: Choice
    backward: Choice | UnsupportedOp
    residuals: tuple[str, ...]
    unheeded: str | None = None

    def heeded_backward(self) -> Choice:
        """Returns the backward choice of a call that is differentiated, and warns about `unheeded`.

        Raises:
          UnsupportedOp: no implementation supports the backward pass.
        """
        if isinstance(self.backward, UnsupportedOp):
            raise UnsupportedOp(str(self.backward))
        if self.unheeded is not None:
            op, instead = self.forward.implementation.op, self.backward.implementation.name
            reason = dict(self.backward.refused).get(self.unheeded)
            warn_once(
                op,
                self.unheeded,
                "backward",
                message=f"{op}: {self.unheeded!r} was named and runs forward, but not backward: {reason}. {instead!r} "
                f"gives the gradient. If that is wanted, name it too: implementation=[{self.unheeded!r}, {instead!r}].",
            )
        return self.backward


def plan(request: Request, operands: Sequence[Any], *, mapped: bool = False) -> Plan:
    """Chooses the implementations of a call from shapes and dtypes.

    Args:
      request: the call.
      operands: arrays, or shapes and dtypes.
      mapped: whether the call is a folded `jax.vmap`; private residuals (`OWN`) are then excluded.

    Raises:
      UnknownName: a requested implementation is not registered.
      UnsupportedOp: no requested (or no registered) implementation supports the forward pass.
    """
    found, candidates = _sides(request, operands)
    named = named_implementations(request.op.name, request.implementation)
    if _is_empty(operands):
        return _noted(request, _of_reference(request, candidates, _EMPTY), found)
    if references_only.value:
        return _of_reference(request, candidates, _COUNTED)
    candidates = candidates | {candidate.name: candidate for candidate in named}
    forward = _choose(found, candidates, named)
    # The op defines the named residuals, so the backward pass of any implementation can read them. Only the
    # implementation that saved `OWN` can read it; it is added below if that implementation is chosen for both passes.
    residuals = tuple(name for name in forward.implementation.residuals if name != OWN)
    try:
        backward: Choice | UnsupportedOp = _choose(found.backward(forward, residuals), candidates, named, forward)
    except UnsupportedOp as error:
        backward = error
    chosen = Plan(forward, backward, ())
    if isinstance(backward, Choice):
        own = (OWN,) if _saves_private_residual(forward, backward) and not mapped else ()
        chosen = Plan(forward, backward, (*residuals, *own), _unheeded(named, forward, backward))
    return _noted(request, chosen, found)


def _noted(request: Request, chosen: Plan, found: "_Sides") -> Plan:
    if request.noted is None:
        return chosen
    # Implementations that XLA cannot partition see the shapes of one device.
    return request.noted(chosen, found.local if chosen.forward.split is not None else found.call)


def _is_empty(operands: Sequence[Any]) -> bool:
    return any(not is_symbolic(size) and size == 0 for x in operands for size in x.shape)


def _of_reference(request: Request, candidates: Mapping[str, OpImplementation], reason: str) -> Plan:
    reference = candidates.get("reference") or request.op.implementation()
    choice = Choice(reference, reason)
    return Plan(choice, choice, tuple(name for name in reference.residuals if name != OWN))


def _saves_private_residual(forward: Choice, backward: Choice) -> bool:
    same = forward.implementation is backward.implementation
    # A split call returns its residuals from `shard_map`, where private ones have no known sharding.
    return same and OWN in forward.implementation.residuals and forward.split is None


@dataclass(frozen=True)
class _Sides:
    """Global call, and the call on one device of a mesh.

    Attributes:
      call: global call.
      local: call on one device's shards; equal to `call` if it is not split.
      split: sharding over devices, or the reason against it; None on a single device.
    """

    call: OpCall
    local: OpCall
    split: Split | str | None

    def backward(self, forward: Choice, residuals: tuple[str, ...]) -> "_Sides":
        fields = {"direction": "backward", "forward": forward.implementation.name, "residuals": residuals}
        call, local = (dataclasses.replace(each, **fields) for each in (self.call, self.local))
        return _Sides(call, local, self.split)


def _sides(request: Request, operands: Sequence[Any]) -> tuple[_Sides, dict[str, OpImplementation]]:
    call, candidates = request.call(operands), implementations_of(request.op.name)
    # On one device, or with all mesh axes already manual, the local call is the global call.
    if free_devices() <= 1:
        return _Sides(call, call, None), candidates
    axes, arrays = request.op.axes(call), request.arrays(operands)
    split = split_of(request.op.name, axes, arrays, operands, request.axes)
    if isinstance(split, str):
        return _Sides(call, call, split), candidates
    of_leaves = axes.of_leaves(arrays)
    parts = [split.part(of_one, x) for of_one, x in zip(of_leaves, operands, strict=True) if of_one is not None]
    return _Sides(call, request.call(parts), split), candidates


def highest_priority(request: Request, operands: Sequence[Any]) -> int:
    """Returns the highest priority of the implementations that support the forward pass on the target chip.

    Raises:
      UnsupportedOp: no implementation supports it.
    """
    found, candidates = _sides(request, operands)
    answers = {name: _answer(candidate, found) for name, candidate in candidates.items()}
    able = [candidates[name].priority for name, answer in answers.items() if answer is True]
    if not able:
        raise UnsupportedOp(_refusals(found.call, answers, ()))
    return max(able)


def choose(call: OpCall, candidates: Mapping[str, OpImplementation]) -> Choice:
    """Chooses among implementations for one direction of a call on one device, as for a call of the op itself.

    Raises:
      UnsupportedOp: none of the candidates supports the call.
    """
    return _choose(_Sides(call, call, None), candidates, ())


def supporting(call: OpCall) -> dict[str, OpImplementation]:
    """Returns the registered implementations that support one direction of a call on the target chip, by name."""
    return {name: found for name, found in implementations_of(call.op).items() if answer(found, call) is True}


def answer(found: OpImplementation, call: OpCall) -> bool | str:
    """Returns True if an implementation supports one direction of a call on the target chip, else the reason.

    A backward pass without a specific forward pass gets all residuals of the op.
    """
    if found.name != "reference" and _is_empty(jax.tree.leaves(dict(call.arrays))):
        return _EMPTY
    if call.direction == "backward" and call.forward is None:
        call = dataclasses.replace(call, residuals=op_named(call.op).residuals)
    return _answer(found, _Sides(call, call, None))


def _unheeded(named: Sequence[OpImplementation], forward: Choice, backward: Choice) -> str | None:
    if not named or forward.implementation.backward is None or backward.implementation in named:
        return None
    return forward.implementation.name


def _choose(
    sides: _Sides,
    candidates: Mapping[str, OpImplementation],
    named: Sequence[OpImplementation],
    forward: Choice | None = None,
) -> Choice:
    """Chooses for one direction.

    Args:
      forward: choice for the forward pass, if this is the backward pass.
    """
    answers = {name: _answer(candidate, sides) for name, candidate in candidates.items()}
    able = {name: candidates[name] for name, answer in answers.items() if answer is True}
    requested = next((candidate for candidate in named if candidate.name in able), None)
    # A forward pass that no requested implementation supports is an error; a backward pass uses another one.
    if not able or (named and requested is None and forward is None):
        raise UnsupportedOp(_refusals(sides.call, answers, named if forward is None else ()))
    ran = None if forward is None else TunedChoice(forward.implementation.name, forward.config, forward.reason)
    # Tables contain measurements on one device, so the lookup uses the shapes of the local call.
    tuned = tuned_choices(sides.local, candidates, answers, requested, ran)
    if requested is not None:
        choice = _named_choice(requested, sides, tuned)
    else:
        choice = _tuned_choice(able, sides, tuned) or _selected_by_hook(sides, able) or _by_order(sides, able, forward)
    if forward is not None:
        choice = _sharing_config(choice, forward)
    refused = tuple((name, _reason(answer)) for name, answer in sorted(answers.items()) if answer is not True)
    return dataclasses.replace(_shared(choice, sides), refused=refused)


def _shared(choice: Choice, sides: _Sides) -> Choice:
    """Adds the sharding over devices to a choice, and the unsplit axes to its reason."""
    # XLA partitions implementations that are not opaque. Without a split, the call runs on one device.
    if not choice.implementation.is_opaque or not isinstance(sides.split, Split):
        return choice
    reason = "; ".join([choice.reason, *sides.split.dropped])
    return dataclasses.replace(choice, split=sides.split, reason=reason)


def _answer(candidate: OpImplementation, sides: _Sides) -> bool | str:
    refusal = _refusal(candidate, sides)
    # `target_chip()` measures a CPU on first use, so it is not called for implementations that ignore the chip.
    if refusal is not None or candidate.supports is supports_everything:
        return refusal or True
    try:
        return _supports(candidate, sides, _default(candidate, sides))
    except Exception as error:  # `supports` of a plugin may raise anything; other implementations must remain usable.
        problem = f"its `supports` raised {type(error).__name__}: {error}"
        warn_once(sides.call.op, candidate.name, message=f"{sides.call.op}/{candidate.name} is passed over: {problem}")
        return problem


def _refusal(candidate: OpImplementation, sides: _Sides) -> str | None:
    """Returns the reason why registered properties of an implementation exclude it, or None."""
    if sides.call.direction == "backward" and candidate.backward is None:
        return _NO_BACKWARD
    if candidate.platforms is not None and (platform := target_platform()) not in candidate.platforms:
        return f"it is for {' and '.join(candidate.platforms)}, and the target is {platform}"
    if candidate.is_opaque and isinstance(sides.split, str):
        return sides.split
    if exporting.value and not candidate.exports:
        return "jax.export cannot serialize it"
    if candidate.name != "reference" and has_symbolic_size(sides.call.arrays):
        return "sizes are symbolic, which only the reference supports"
    return None


def _seen(candidate: OpImplementation, sides: _Sides) -> OpCall:
    # An opaque implementation runs on the shards of one device.
    return sides.local if candidate.is_opaque else sides.call


def _default(candidate: OpImplementation, sides: _Sides) -> Any:
    return None if candidate.default is None else candidate.default(_seen(candidate, sides), target_chip())


def _supports(candidate: OpImplementation, sides: _Sides, config: Any) -> bool | str:
    return candidate.supports(_seen(candidate, sides), target_chip(), config)


def _named_choice(implementation: OpImplementation, sides: _Sides, tuned: Mapping[str, TunedChoice]) -> Choice:
    for table, advice in tuned.items():
        if advice.implementation == implementation.name:
            reason = f"named by the caller; config of tuned table {table!r}: {advice.reason}"
            return _choice(implementation, sides, reason, advice.config)
    return _choice(implementation, sides, "named by the caller")


def _tuned_choice(
    able: Mapping[str, OpImplementation], sides: _Sides, tuned: Mapping[str, TunedChoice]
) -> Choice | None:
    for table, advice in tuned.items():
        # Tables are sorted by name, and the first with advice wins.
        chosen = able[advice.implementation]
        return _choice(chosen, sides, f"tuned table {table!r}: {advice.reason}", advice.config)
    return None


def _choice(implementation: OpImplementation, sides: _Sides, reason: str, config: Any = None) -> Choice:
    """Returns the choice with `config` if the implementation supports it for the call, else with the default."""
    if implementation.default is None:
        return Choice(implementation, reason)
    if config is not None:
        answer = _supports(implementation, sides, config)
        if answer is True:
            return Choice(implementation, reason, config)
        reason = f"{reason}, but not with {config}: {_reason(answer)}"
    return Choice(implementation, reason, _default(implementation, sides))


def _sharing_config(backward: Choice, forward: Choice) -> Choice:
    """Uses the forward config for a backward pass that reads private residuals (`OWN`) of its own forward pass."""
    implementation = backward.implementation
    if implementation is not forward.implementation or OWN not in implementation.residuals:
        return backward
    if backward.config == forward.config:
        return backward
    return Choice(implementation, f"{backward.reason}; with the config of its forward pass", forward.config)


def _selected_by_hook(sides: _Sides, able: Mapping[str, OpImplementation]) -> Choice | None:
    call = sides.local
    # Without a choice, the hook is not called.
    if len(able) < 2:
        return None
    answer = plugins.select_op(call=call, chip=target_chip(), candidates=tuple(able))
    if answer is None:
        return None
    if answer not in able:
        raise PluginError(
            f"stack_select_op chose {answer!r} for {call.op} {call.direction}; expected one of {tuple(able)}."
        )
    return _choice(able[answer], sides, "chosen by stack_select_op")


def _by_order(sides: _Sides, able: Mapping[str, OpImplementation], forward: Choice | None) -> Choice:
    if len(able) == 1:
        return _choice(next(iter(able.values())), sides, "the only one that supports the call")
    best = preferred(able)
    first = able[best[0]]
    preceded = [name for name in first.before if name in able and able[name].priority >= first.priority]
    reason = f"before {' and '.join(preceded)}" if preceded else f"priority {first.priority}"
    if forward is not None and forward.implementation.name in best:
        return _choice(forward.implementation, sides, f"{reason}, the forward's own")
    if len(best) > 1:
        # A silent choice by the order of installation would differ between machines.
        op, others = sides.call.op, " and ".join(map(repr, best[1:]))
        warn_once(
            op,
            *best,
            message=f"{op}: {first.name!r} runs because it was installed first, but {others} could run with the same "
            f"priority {first.priority}. Name one, implementation={best[1]!r}, or define it with "
            f"before=({first.name!r},).",
        )
        reason = f"{reason}, installed before {others}"
    return _choice(first, sides, reason)


def _refusals(call: OpCall, answers: Mapping[str, bool | str], named: Sequence[OpImplementation]) -> str:
    subject = call.op if call.direction == "forward" else f"{call.op} {call.direction}"
    names = " or ".join(repr(candidate.name) for candidate in named)
    head = f"{subject}: {names} cannot run this call." if named else f"{subject}: no implementation supports this call."
    shapes = ", ".join(f"{name} {format_shapes(struct)}" for name, struct in call.arrays.items() if struct is not None)
    lines = [f"  {name}: {_reason(answer)}" for name, answer in sorted(answers.items())]
    able = [name for name, answer in answers.items() if answer is True]
    remedy = f"Name one that supports it ({', '.join(sorted(able))}) or none." if able else "Change the call."
    return "\n".join([head, f"The call: {shapes}.", "Implementations:", *lines, remedy])


def _reason(answer: bool | str) -> str:
    if answer is True:
        return "supports the call"
    return answer if isinstance(answer, str) else "refused without a reason"


def format_shapes(struct: Any) -> str:
    """Formats dtype and shape of each leaf of an argument: "float32[2, 3]"."""
    return " ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(struct))
