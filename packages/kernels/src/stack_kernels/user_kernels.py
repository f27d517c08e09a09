"""A function as an implementation of an op, checked where it is defined."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from stack_core import ops
from stack_core.abi import AUTODIFF, OpCall, OpImplementation, supports_everything
from stack_core.errors import ArgumentError, UnknownName, nearest

__all__ = ["implementation", "parameters_of"]


def implementation(
    op: str,
    *,
    name: str,
    configs: Sequence[Any] = (),
    supports: Callable[[OpCall, Any], bool | str] = supports_everything,
    vjp: Callable[..., Any] | str | None = None,
    priority: int = 1,
) -> Callable[[Callable[..., Any]], OpImplementation]:
    """Makes a function an `OpImplementation`, which a plugin registers with one line.

        @implementation("norm", name="acme", configs=(Rows(32), Rows(8)), supports=_supports)
        def acme(x, scale, *, offset, kind, epsilon, scale_offset, residual, axis, config): ...

        registry.add("norm/acme", "acme.kernel:acme")       # in the plugin's stack_register_ops

    From then on calls of the op are dispatched to it, `stack tune` chooses among its configs, `stack bench ops`
    measures it, and `stack_core.testing.op_checks(op)` are its contract.

    Args:
      op: a function of `stack_core.ops`. The decorated function takes the op's parameters by name, all but
        `implementation`, with every default filled in; and `config` where there are `configs`.
      name: what callers and tables name it by.
      configs: tunable settings, best default first: objects of one frozen dataclass whose fields JSON can hold.
      supports: answers True or the reason why not, from the call and the target chip.
      vjp: None leaves the gradient to others, in the end the op's reference; `stack_core.abi.AUTODIFF` lets JAX
        differentiate the function, by its own `jax.custom_vjp` if it has one; or a function
        `(arrays, options, output, cotangent) -> gradients by parameter name`, which takes `config` too.
      priority: the highest among those that support a call is chosen, and the references have 0; a negative one runs
        where it is named or a tuned table says so.

    Raises:
      UnknownName: there is no such op.
      ArgumentError: the function's parameters are not the op's, or a setting is not what it is described as above.
    """
    what = f"implementation {name!r} of {op!r}"
    parameters = parameters_of(op)
    _check_configs(what, tuple(configs))
    _check_callable(what, "supports", supports, ("call", "chip"))
    if vjp is not None and vjp != AUTODIFF:
        _check_callable(what, "vjp", vjp, ("arrays", "options", "output", "cotangent"), config=bool(configs))

    def implement(function: Callable[..., Any]) -> OpImplementation:
        expected = (*parameters, "config") if configs else parameters
        _check_parameters(what, function, expected)
        return OpImplementation(op, name, function, supports, vjp, tuple(configs), priority)

    return implement


def parameters_of(op: str) -> tuple[str, ...]:
    """The parameters of an op that its implementations take.

    Raises:
      UnknownName: there is no such op.
    """
    known = _ops()
    if op not in known:
        raise UnknownName(f"Unknown op {op!r}.{nearest(op, known)} There are: {', '.join(known)}.")
    return known[op]


@functools.cache
def _ops() -> dict[str, tuple[str, ...]]:
    # Not from the registry of ops: a plugin may be imported while that is filled.
    functions = {name: getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    parameters = {name: tuple(inspect.signature(function).parameters) for name, function in functions.items()}
    return {
        name: tuple(parameter for parameter in names if parameter != "implementation")
        for name, names in parameters.items()
        if "implementation" in names
    }


def _check_parameters(what: str, function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    found = inspect.signature(function).parameters.values()
    named = [each.name for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in found)
    missing = [name for name in expected if name not in named and not takes_all]
    problems = [f"it lacks {', '.join(missing)}"] if missing else []
    problems += [
        f"nothing is passed as {each}{nearest(each, missing or expected)}" for each in named if each not in expected
    ]
    problems += [f"{each.name} must not be positional-only" for each in found if each.kind is each.POSITIONAL_ONLY]
    if problems:
        raise ArgumentError(
            f"{what}: the parameters of {getattr(function, '__name__', function)!r} do not fit: {'; '.join(problems)}. "
            f"Expected, all passed by name: {', '.join(expected)}."
        )


def _check_configs(what: str, configs: tuple[Any, ...]) -> None:
    kinds = {type(config) for config in configs}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ArgumentError(f"{what}: its configs are of several types, {names}; expected one frozen dataclass.")
    for config in configs:
        if not dataclasses.is_dataclass(config) or isinstance(config, type) or not _is_frozen(config):
            raise ArgumentError(f"{what}: config {config!r} is no object of a frozen dataclass; tables key by it.")
        try:
            kept = type(config)(**json.loads(json.dumps(dataclasses.asdict(config))))
        except TypeError as error:
            raise ArgumentError(f"{what}: config {config!r} cannot be kept in a tuned table: {error}.") from error
        if kept != config:
            raise ArgumentError(
                f"{what}: config {config!r} comes back from a tuned table as {kept!r}; give its fields types that JSON "
                "has: integers, strings, bools."
            )


def _is_frozen(config: Any) -> bool:
    return type(config).__dataclass_params__.frozen


def _check_callable(what: str, argument: str, value: Any, takes: tuple[str, ...], *, config: bool = False) -> None:
    keywords = ("config",) if config else ()
    try:
        inspect.signature(value).bind(*takes, **dict.fromkeys(keywords))
    except TypeError as error:
        listing = ", ".join((*takes, *keywords))
        raise ArgumentError(f"{what}: {argument} is {value!r}; expected a function of ({listing}): {error}.") from error
