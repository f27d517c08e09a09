"""The `stack` command. Its subcommands come from plugins and are imported only when they run."""

import contextlib
import faulthandler
import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import cyclopts

from stack_core.abi.errors import ConfigError, HardwareError, StackError, UnknownName, nearest
from stack_core.abi.local_paths import local_path, refuse_remote
from stack_core.abi.plugins import plugins, registries
from stack_core.chips.device_errors import explain_device_error
from stack_core.command_names import command_name, is_group

__all__ = ["main", "overrides_from"]

USER_ERROR = 2
_NAMED = 4  # number of a group's commands in its help line; `stack GROUP` lists all


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `stack`; exits with 0, or with 2 after a `StackError` or wrong usage.

    `stack_core.entry` handles Ctrl-C and requests huge pages.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    name = ""
    try:
        if arguments is None and sys.stderr is not None:
            faulthandler.enable()  # prints the Python stack after a crash in compiled code
        name = command_name(tokens)
        app = _app(name)
        if tokens[:1] != ["plugins"]:  # that command reports the same in detail
            _warn_of_plugins()
        if name and not is_group(name):
            _check_command(name)
        with _explaining_devices(), _warnings_in_one_line():
            app(tokens, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        _fail(f"{_explained(error, name)}\nRun `stack {name} --help`." if name else str(error), USER_ERROR)
    except StackError as error:
        _fail(str(error), USER_ERROR)
    except KeyboardInterrupt:
        if arguments is None:
            raise
        _fail("Interrupted.", 130)  # 128 + SIGINT, as in shells
    except BrokenPipeError:
        sys.stderr.close()  # prevents a second error message at exit
        sys.exit(141)  # 128 + SIGPIPE


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Prints the warnings of stack's packages as sentences; those of other packages keep their file and line."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if any(part.startswith("stack_") for part in Path(filename).parts):
            return f"stack: warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextlib.contextmanager
def _explaining_devices() -> Iterator[None]:
    """Replaces JAX's errors about the driver, memory, or a platform without devices by a HardwareError."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        is_of_jax = type(error).__module__ == "jax.errors" or str(error).startswith("Unable to initialize backend")
        if is_of_jax and (problem := explain_device_error(str(error))):
            raise HardwareError(problem) from error
        platforms, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
        if not platforms or jax is None:
            raise
        try:
            jax.devices()  # JAX filters its frames from tracebacks; only this call reveals the cause.
        except (RuntimeError, AssertionError) as missing:
            reason = f" ({missing})" if str(missing) else ""
            raise HardwareError(
                f"JAX_PLATFORMS is {platforms!r}, but JAX finds no such device{reason}. `stack doctor` lists the "
                "devices of this machine. Unset JAX_PLATFORMS, or install JAX's extra for this hardware, such as "
                "jax[cuda12]."
            ) from error
        raise


def overrides_from(tokens: Sequence[str]) -> list[str]:
    """Converts `--model.layers 6 --run.steps=300` to ["model.layers=6", "run.steps=300"].

    Raises:
      ConfigError: a token is not an option, or an option has no value.
    """
    overrides: list[str] = []
    remaining = list(tokens)
    while remaining:
        token = remaining.pop(0)
        if not token.startswith("--"):
            advice = " The shell expands patterns: put them in quotes." if Path(token).exists() else ""
            raise ConfigError(f"Unexpected argument {token!r}; overrides have the form --section.key VALUE.{advice}")
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals and not remaining:
            raise ConfigError(f"Override {token!r} has no value; write {token} VALUE.")
        overrides.append(f"{name}={value if equals else remaining.pop(0)}")
    return overrides


def _app(named: str) -> cyclopts.App:
    """Builds the app with all commands and their help lines.

    The command `named` is imported, and its docstring is its help.
    """
    app = cyclopts.App(
        name="stack",
        help="Train, quantize, align, serve and profile models on JAX.",
        version=lambda: version("stack-core"),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=cyclopts.Parameter(converter=_convert),
    )
    # Its script lists all options, so it imports all commands, once; completing runs nothing of ours.
    app.register_install_completion_command(help="Install completion for bash, zsh or fish.")
    groups = {"": app}
    for entry in registries.commands.entries():
        left_out = f"command {entry.name!r} of plugin {entry.provider!r} is left out"
        if is_group(entry.name):
            _note(f"{left_out}: other commands begin with its name, so it is a group.")
            continue
        try:
            group, _, name = entry.name.rpartition(" ")
            line = {} if entry.name == named else {"help": entry.details.get("help", "")}
            _group(group, groups).command(entry.target, name=name, **line)
        except Exception as error:  # Third-party targets can be any object; the remaining commands must work.
            _note(f"{left_out}, because it cannot be called: {type(error).__name__}: {error}")
    return app


def _convert(type_: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Converts an option's values as Cyclopts does, but resolves paths and rejects fractions for integers."""
    if type_ is int or (int in get_args(type_) and float not in get_args(type_)):
        for token in tokens:
            try:
                is_whole = float(token.value).is_integer()
            except (ValueError, OverflowError):
                continue  # Cyclopts rejects the value or parses it as base 16
            if not is_whole:
                raise ValueError(f"{token.value!r} is not a whole number")
    found = cyclopts.convert(type_, tokens)
    several = isinstance(found, (list, tuple))
    if any(isinstance(value, Path) for value in (found if several else [found])):
        for token in tokens:  # checks the raw text, since Path collapses the double slash
            refuse_remote(token.value)
        return type(found)(map(local_path, found)) if several else local_path(found)
    return found


def _check_command(name: str) -> None:
    """Raises UnknownName with the nearest command and the package to install, without the list of all commands."""
    try:
        registries.commands[name]
    except UnknownName as error:
        message, group = str(error).partition(" Registered: ")[0], name.rpartition(" ")[0]
        if not group and "Did you mean" not in message:  # the first word of `bench ops`
            message += nearest(name, sorted({known.partition(" ")[0] for known in registries.commands}))
        raise UnknownName(f"{message} `{f'stack {group}'.rstrip()} --help` lists all.") from error


def _group(name: str, groups: dict[str, cyclopts.App]) -> cyclopts.App:
    """Returns the group of that name, created on first use."""
    if name not in groups:
        parent, _, word = name.rpartition(" ")
        known = [each.removeprefix(f"{name} ") for each in registries.commands if each.startswith(f"{name} ")]
        more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
        groups[name] = cyclopts.App(name=word, help=f"A group of commands: {', '.join(known[:_NAMED])}{more}.")
        _group(parent, groups).command(groups[name])
    return groups[name]


def _warn_of_plugins() -> None:
    """Prints the plugins that were left out or are incomplete after loading and registering commands."""
    for report in plugins.reports():
        if report.status in ("failed", "incomplete"):
            left_out = "is left out" if report.status == "failed" else "is incomplete"
            remedy = f"Fix or uninstall {report.distribution}, or set STACK_DISABLE_PLUGINS={report.name}."
            _note(f"plugin {report.name!r} {left_out}: {'; '.join(report.problems)}\n  {remedy}")
    for problem in plugins.mistakes():
        _note(problem)


def _explained(error: cyclopts.CycloptsError, name: str) -> str:
    """Returns the message of a usage error; for arguments in excess with the arguments that the command takes."""
    if not isinstance(error, cyclopts.UnusedCliTokensError) or error.target is None:
        return str(error)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [each for each in inspect.signature(error.target).parameters.values() if each.kind in positional]
    named = [f"[{each.name.upper()}]" if each.default is not each.empty else each.name.upper() for each in parameters]
    takes = " ".join([*named, "and options"]) if named else "options only"
    return f"Unexpected {', '.join(map(repr, error.unused_tokens or []))}: `stack {name}` takes {takes}."


def _note(message: str) -> None:
    print(f"stack: {message}", file=sys.stderr)


def _fail(message: str, status: int) -> None:
    _note(f"error: {message}")
    sys.exit(status)
