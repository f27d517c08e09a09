"""Decorator that makes a function an op implementation and checks its definition."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from stack_core.abi.errors import ArgumentError
from stack_core.abi.ops import OpCall, OpImplementation, supports_everything
from stack_core.ops.building import check_parameters, check_takes, forward_only, parameters_of

__all__ = ["implementation", "parameters_of"]


Configs = Sequence[Any] | Callable[[OpCall, Any], Sequence[Any]]
"""Tunable settings, best default first: a sequence for all calls, or a function of a call and a chip."""


def implementation(  # noqa: PLR0913  each is a field of OpImplementation
    op: str,
    *,
    name: str,
    configs: Configs = (),
    supports: Callable[[OpCall, Any, Any], bool | str] = supports_everything,
    backward: Callable[..., Any] | None = None,
    residuals: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    is_opaque: bool = True,
    priority: int = 1,
    before: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], OpImplementation]:
    """Makes a function an `OpImplementation` that a plugin registers with one line.

        @implementation("norm", name="acme", configs=(Rows(32), Rows(8)), supports=_supports)
        def acme(x, scale, *, offset, kind, epsilon, scale_offset, residual, axis, config): ...

        registry.add("norm/acme", "acme.kernel:acme")       # in the plugin's stack_register_ops

    Once registered, calls of the op are dispatched to it, `stack tune` chooses among its configs, `stack bench ops`
    measures it, and `stack_core.testing.op_checks(op)` is its contract suite.

    Args:
      op: name of a function of `stack_core.ops`. The decorated function takes the op's parameters by name, except
        `implementation` and `axes`, with every default filled in, and `config` if there are `configs`. It returns the
        result; with `residuals` it also takes `requested`, the names of the residuals to return, and returns the
        result and a mapping of these residuals.
      name: name of the implementation in calls and in tables.
      configs: tunable settings, best default first: instances of one frozen dataclass with JSON-serializable fields, or
        a function of (call, chip) that returns them.
      supports: function of the call, the target chip and a config that returns True or the reason why not.
      backward: function `(arrays, options, outputs, residuals, cotangents, *, requested) -> gradients by parameter
        name`, which also takes `config` if there are `configs`. None leaves the gradient to other implementations,
        ultimately to the op's reference.
      residuals: names of the values that the function saves for a backward pass, as in `OpImplementation`.
      platforms: platforms it runs on, among "cpu", "gpu" and "tpu"; None for all.
      is_opaque: True if XLA cannot split it over devices, as is the case for a Pallas kernel.
      priority: the implementation with the highest priority that supports a call is chosen; references have 0. An
        implementation with a negative priority runs only if it is named or chosen by a tuned table. Among equal
        priorities the first one installed runs, with a warning.
      before: names of the op's implementations that this one precedes regardless of priority: `("xla_cpu",)`.

    Raises:
      UnknownName: the op is unknown.
      ArgumentError: the function's parameters are not the op's, or a setting does not match its description above.
    """
    label = f"implementation {name!r} of {op!r}"
    parameters, is_tuned = parameters_of(op), callable(configs) or bool(configs)
    extra = ("config",) if is_tuned else ()
    if not callable(configs):
        _check_configs(label, tuple(configs))
    if before and (isinstance(before, str) or name in before or priority < 0):
        problem = "itself" if name in before else f"one that runs only where it is named, with priority={priority},"
        problem = "a string" if isinstance(before, str) else problem
        raise ArgumentError(
            f"{label}: before={before!r} makes {problem} precede others; expected names of other implementations of "
            f"{op!r} as a tuple, and a priority of at least 0."
        )
    check_takes(f"{label}: supports", supports, ("call", "chip", "config"))
    if backward is not None:
        takes = ("arrays", "options", "outputs", "residuals", "cotangents")
        check_takes(f"{label}: backward", backward, takes, ("requested", *extra))

    def space(call: OpCall, chip: Any) -> tuple[Any, ...]:
        found = tuple(configs(call, chip)) if callable(configs) else tuple(configs)
        if callable(configs):
            _check_configs(label, found)
        return found

    def implement(function: Callable[..., Any]) -> OpImplementation:
        check_parameters(label, function, (*parameters, *(("requested",) if residuals else ()), *extra))
        return OpImplementation(
            op,
            name,
            function if residuals else forward_only(function),
            backward,
            platforms=None if platforms is None else tuple(platforms),
            supports=supports,
            # The configs are listed again for each call, as they may depend on its sizes.
            default=(lambda call, chip: next(iter(space(call, chip)), None)) if is_tuned else None,
            space=space,
            residuals=tuple(residuals),
            is_opaque=is_opaque,
            priority=priority,
            before=tuple(before),
        )

    return implement


def _check_configs(label: str, configs: tuple[Any, ...]) -> None:
    kinds = {type(config) for config in configs}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ArgumentError(f"{label}: its configs are of several types, {names}; expected one frozen dataclass.")
    for config in configs:
        if not dataclasses.is_dataclass(config) or isinstance(config, type) or not _is_frozen(config):
            raise ArgumentError(
                f"{label}: config {config!r} is not an instance of a frozen dataclass; tables key by it."
            )
        try:
            kept = type(config)(**json.loads(json.dumps(dataclasses.asdict(config))))
        except TypeError as error:
            raise ArgumentError(f"{label}: config {config!r} cannot be kept in a tuned table: {error}.") from error
        # JSON changes some values without an error, such as a tuple to a list.
        if kept != config:
            raise ArgumentError(
                f"{label}: config {config!r} comes back from a tuned table as {kept!r}; give its fields types that "
                "JSON has: integers, strings, bools."
            )


def _is_frozen(config: Any) -> bool:
    return type(config).__dataclass_params__.frozen
