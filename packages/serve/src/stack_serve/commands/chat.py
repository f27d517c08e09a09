"""`stack chat`: chat with a model in the terminal."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_core.abi.errors import GenerationError, StackError, nearest
from stack_core.abi.local_paths import local_path, refuse_remote

if TYPE_CHECKING:
    from stack_serve.client.conversation import ChatModel, Conversation

__all__ = ["chat"]

_HELP = """/reset            start a new conversation
/system TEXT      start a new conversation with this system prompt
/save FILE        write the conversation as JSON
/quit             quit (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ continues on the next line."""


_MAX_INT = 2**63 - 1  # the largest integer accepted by common JSON parsers
_RANGES = {
    "temperature": (0, sys.float_info.max, "a finite number from 0"),
    "top_k": (0, _MAX_INT, "an integer from 0 (all tokens), below 2^63"),
    "top_p": (sys.float_info.min, 1, "a number above 0, at most 1"),
    "max_tokens": (1, _MAX_INT, "an integer from 1, below 2^63"),
    "seed": (-_MAX_INT, _MAX_INT, "an integer between -2^63 and 2^63"),
}
"""Minimum and maximum of each option, and the description of the range in error messages."""


def chat(  # noqa: PLR0913, each parameter is an option of the command
    target: str,
    /,
    *,
    model: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> None:
    """Chat with a model: stack chat http://HOST:PORT/v1, or stack chat RUN|HF_DIR|gguf:FILE

    Answers are streamed, in a terminal after the model's reasoning. With piped input, each line is a message and only
    the answers are printed. /help lists the commands.

    Args:
      target: address of a server with OpenAI's API, or a model, which is loaded in this process: a directory of a run
        or of a Hugging Face checkpoint, hf:ORG/MODEL of the hub, or gguf:FILE.
      model: name of the model on the server (the first model listed by the server).
      api_key: API key sent as a bearer token ($OPENAI_API_KEY).
      system: system prompt.
      temperature: divisor of the logits (the model's default); 0 is greedy decoding.
      top_k: number of most likely tokens to sample from; 0 is all.
      top_p: total probability of the most likely tokens to sample from.
      max_tokens: maximum number of tokens per answer.
      seed: seed of sampling; the same seed and messages give the same answers.
    """
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "max_tokens": max_tokens, "seed": seed
    }  # fmt: skip
    settings = {name: value for name, value in options.items() if value is not None}
    for name, value in settings.items():
        min_, max_, expected = _RANGES[name]
        if not min_ <= value <= max_:  # also rejects NaN
            raise GenerationError(f"--{name.replace('_', '-')} is {value}; expected {expected}.")
    if temperature == 0 and (unused := [name for name in ("top_k", "top_p") if name in settings]):
        raise GenerationError(
            f"--{unused[0].replace('_', '-')} has no effect with --temperature 0, which takes the most likely token. "
            "Leave out one of them."
        )
    with _opened(target, model, api_key, settings, system) as talker:
        from stack_serve.client.conversation import Conversation

        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        conversation = Conversation(talker, system)
        if terminal:
            with suppress(ImportError):  # readline, missing on some systems, adds line editing and history to `input`
                import readline  # noqa: F401
            print(f"{talker.name}. /help lists the commands.", file=sys.stderr)
        _Loop(conversation, terminal=terminal).run()


def _opened(
    target: str, model: str | None, api_key: str | None, settings: dict[str, Any], system: str | None
) -> "AbstractContextManager[ChatModel]":
    from stack_serve.client.conversation import RemoteModel, local_model

    if "://" in refuse_remote(target):
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        return nullcontext(
            RemoteModel(target, model=model, api_key=key, settings=settings, show_reasoning=_show_reasoning)
        )
    # FORMAT:NAME may be a model of the Hugging Face hub, and its format explains what is wrong.
    if not re.match(r"\w+:", target) and not local_path(target).exists():
        raise GenerationError(
            f"{target!r} is neither a directory or file nor the address of a server, which starts with http:// or https://."
        )
    if model is not None:
        raise GenerationError("--model selects a model of a server; a directory contains only one. Leave it out.")
    if api_key is not None:
        raise GenerationError(f"--api-key is sent to a server; {target!r} is loaded in this process. Leave it out.")
    return local_model(target, settings, system)


class _Loop:
    """Read loop for messages and commands.

    Args:
      terminal: True if input and output are a terminal. Otherwise only the answers are printed, and an error ends the
        loop.
    """

    def __init__(self, conversation: "Conversation", *, terminal: bool) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: _note(_HELP),
            "/reset": lambda rest: conversation.reset(conversation.system),
            "/system": lambda rest: conversation.reset(rest or None),
            "/save": self._save,
        }

    def run(self) -> None:
        """Runs until the end of the input or /quit."""
        while (text := self._read()) is not None:
            command, _, rest = text.strip().partition(" ")
            if command in ("/quit", "/exit"):
                return
            try:
                self._do(command, rest.strip(), text)
            except StackError as error:
                if not self._terminal:
                    raise
                _note(f"error: {error}")

    def _do(self, command: str, rest: str, text: str) -> None:
        if command in self._commands:
            self._commands[command](rest)
        elif command.startswith("/") and "/" not in command[1:]:
            advice = nearest(command, [*self._commands, "/quit"])
            raise GenerationError(f"Unknown command {command!r}.{advice} /help lists them.")
        elif text.strip():
            self._say(text)

    def _read(self) -> str | None:
        """Reads the next message; returns None at the end of the input."""
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "> ") if self._terminal else "")
            except EOFError:
                if self._terminal:
                    print()
                return "\n".join(lines) if lines else None
            except UnicodeDecodeError as error:
                raise GenerationError(f"The input is not UTF-8: {error}.") from error
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print()
                lines = []
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _say(self, text: str) -> None:
        try:
            cut_short = self._conversation.say(text, _write)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            cut_short = "stopped"
        print(flush=True)
        if cut_short is not None:
            _note(f"[{cut_short}]")

    def _save(self, path: str) -> None:
        if not path:
            raise GenerationError("Name a file: /save conversation.json")
        self._conversation.save(Path(path).expanduser())
        count = len(self._conversation.messages)
        _note(f"{count} message{'s' * (count != 1)} saved to {path}.")


def _write(piece: str) -> None:
    """Prints and flushes text; characters outside the terminal's encoding become "?"."""
    encoding = sys.stdout.encoding or "utf-8"
    print(piece.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _show_reasoning(piece: str) -> None:
    if sys.stdin.isatty() and sys.stdout.isatty():
        _write(f"\x1b[2m{piece}\x1b[0m")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
