"""`stack profile NAME TRACE`: a command for each registered analysis, built from its signature and docstring.

`plugin.py` registers the command NAME as the attribute `analysis_NAME` of this module.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final

from stack_core.abi.plugins import registries
from stack_profile.answer import Answer
from stack_profile.commands.printing import Limit, PrintCsv, PrintJson, TracePath, check_formats, show
from stack_profile.errors import ProfileError
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace

__all__ = ["command"]


def __getattr__(name: str) -> Callable[..., None]:
    """Builds the command `analysis_NAME` on first use; other commands need not import the analysis."""
    analysis = name.removeprefix("analysis_")
    if analysis == name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return command(analysis, registries.analyses[analysis])


def command(name: str, analysis: Callable[..., Answer[Any]]) -> Callable[..., None]:
    """Builds a function that runs `analysis` on a trace and prints the answer, with the options of both.

    Raises:
      ProfileError: the analysis does not have the form `name(trace, *, option=default, ...)`.
    """
    options = _options(name, analysis)

    def run(
        trace: TracePath, /, *, limit: Limit = 20, json: PrintJson = False, csv: PrintCsv = False, **arguments: Any
    ) -> None:
        check_formats(json=json, csv=csv)
        loaded = load_trace(trace)
        answer = analysis(loaded, **arguments)
        show(answer, limit=limit, json=json, csv=csv, shorten=short_paths(loaded).text)

    where, *printing, _ = inspect.signature(run).parameters.values()
    run.__name__, run.__doc__ = name, inspect.getdoc(analysis)
    run.__signature__ = inspect.Signature([where, *options, *printing])  # pyrefly: ignore
    return run


def _options(name: str, analysis: Callable[..., Answer[Any]]) -> Sequence[inspect.Parameter]:
    """Returns the analysis's parameters except the trace, with resolved annotations."""
    try:
        _, *options = inspect.signature(analysis).parameters.values()
        hints = typing.get_type_hints(analysis, include_extras=True)
    except Exception as error:  # Annotations of third-party plugins may raise anything.
        raise ProfileError(
            f"Analysis {name!r} has no signature to make a command of: {error!r}. {_EXPECTED}"
        ) from error
    for option in options:
        if option.kind is not option.KEYWORD_ONLY or option.default is option.empty or option.name in _TAKEN:
            raise ProfileError(f"Analysis {name!r} cannot be a command because of its parameter {option}. {_EXPECTED}")
    return [option.replace(annotation=hints.get(option.name, str)) for option in options]


_TAKEN: Final = ("trace", "limit", "json", "csv")
_EXPECTED: Final = (
    f"Expected `analysis(trace, *, option=default, ...) -> Answer`, where no option is named {', '.join(_TAKEN)}."
)
