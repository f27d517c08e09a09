import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stack_core.abi.errors import StackError
from stack_serve.commands.chat import chat

from ..openai_server import OpenAIServer, Server


@pytest.fixture
def talk(openai_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Pipes lines into `stack chat`; returns what it wrote to standard output."""

    def run(*lines: str, **options: object) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(openai_server[1], **{"max_tokens": 3, **options})  # type: ignore[arg-type]
        return capsys.readouterr().out

    return run


def roles(server: OpenAIServer) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in body["messages"]] for body in server.bodies]


def test_in_a_pipe_answers_alone_are_written(talk: Callable, openai_server: Server) -> None:
    assert talk("hello", "", "again") == "0 1 2 \n0 1 2 \n"
    assert roles(openai_server[0]) == [
        [("user", "hello")],
        [("user", "hello"), ("assistant", "0 1 2 "), ("user", "again")],
    ]


def test_options_are_fields_of_the_request(talk: Callable, openai_server: Server) -> None:
    talk("hello", temperature=0.5, top_k=4, seed=7, api_key="secret", model="uncounted", system="Be brief.")
    server = openai_server[0]
    assert {name: server.bodies[0][name] for name in ("temperature", "top_k", "seed", "max_tokens", "model")} == {
        "temperature": 0.5, "top_k": 4, "seed": 7, "max_tokens": 3, "model": "uncounted"
    }  # fmt: skip
    assert "top_p" not in server.bodies[0]
    assert server.keys == ["Bearer secret"]
    assert roles(server) == [[("system", "Be brief."), ("user", "hello")]]


def test_reset_and_system_begin_again(talk: Callable, openai_server: Server) -> None:
    talk("one", "/system Be brief.", "two", "/reset", "three", "/quit", "four")
    assert roles(openai_server[0]) == [
        [("user", "one")],
        [("system", "Be brief."), ("user", "two")],
        [("system", "Be brief."), ("user", "three")],
    ]


def test_save_writes_the_messages(talk: Callable, tmp_path: Path) -> None:
    talk("häl\\", "lo", f"/save {tmp_path}/said.json")
    assert json.loads((tmp_path / "said.json").read_text()) == {
        "messages": [{"role": "user", "content": "häl\nlo"}, {"role": "assistant", "content": "0 1 2 "}]
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save", "Name a file"),
        ("/save /no/such/folder/x.json", "cannot be written"),
        ("/rest", "Unknown command '/rest'.* Did you mean '/reset'"),
    ],
)
def test_mistakes_are_told(talk: Callable, line: str, message: str) -> None:
    with pytest.raises(StackError, match=message):
        talk(line)


def test_a_path_is_no_command(talk: Callable) -> None:
    assert talk("/usr/bin is what?") == "0 1 2 \n"


@pytest.mark.parametrize(
    ("model", "message"), [("busy", "answers 429: The queue is full"), ("broken", "broke off: out of order")]
)
def test_an_answer_that_fails_is_told(talk: Callable, model: str, message: str) -> None:
    with pytest.raises(StackError, match=message):
        talk("hello", model=model)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("http://127.0.0.1:9", {}, "cannot be reached"),
        ("no/such/folder", {}, "is neither a directory or file nor the address of a server"),
        ("hf:some/model", {"model": "m"}, "Leave it out"),  # may be on the hub
        (".", {"model": "m"}, "Leave it out"),
        (".", {"api_key": "k"}, "--api-key is sent to a server"),
        (".", {"temperature": 0.0, "top_k": 5}, "--top-k has no effect with --temperature 0"),
        (".", {}, "holds no model of a known format"),
        *(
            (".", {name: value}, rf"--{name.replace('_', '-')} is {re.escape(str(value))}; expected")
            for name, values in {
                "temperature": (-0.5, float("inf"), float("nan")),
                "top_k": (-1, 2**63),
                "top_p": (0.0, -1.0, 1.1),
                "max_tokens": (0, -1),
                "seed": (2**63,),
            }.items()
            for value in values
        ),
    ],
)
def test_what_cannot_be_opened_is_told(target: str, options: dict, message: str) -> None:
    with pytest.raises(StackError, match=message):
        chat(target, **options)


# A shell that runs tests in the background has them ignore Ctrl-C, and so would a program that they start.
_CHAT = """
import signal
from stack_core.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


class Terminal:
    """`stack chat` as a person has it before them."""

    def __init__(self, *arguments: str) -> None:
        self._descriptor, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHAT, "chat", *arguments],
            stdin=child, stdout=child, stderr=child, start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(child)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt_the_prompt(self) -> None:
        # A signal that `input` gets between printing its prompt and waiting for keys waits for a key: press again.
        while True:
            self.process.send_signal(signal.SIGINT)
            if select.select([self._descriptor], [], [], 2)[0]:
                return

    def wait_for(self, pattern: str) -> None:
        end_s = time.monotonic() + 60
        while not (found := re.search(pattern, self._seen)):
            assert time.monotonic() < end_s, self._seen
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self._seen += os.read(self._descriptor, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(openai_server: Server) -> None:
    server, address = openai_server
    with terminal(address, "--model", "endless") as typed:
        typed.wait_for("> ")
        typed.type("hello\n")
        typed.wait_for(r"5 6 7 ")
        typed.process.send_signal(signal.SIGINT)
        typed.wait_for(r"\[stopped\]\s+> ")
        typed.type("/rest\n")
        typed.wait_for(r"Did you mean '/reset'[^>]*> ")
        typed.interrupt_the_prompt()
        typed.wait_for("> ")
        typed.type("again\n")
        typed.wait_for("0 1 2 ")
        typed.process.send_signal(signal.SIGINT)
        typed.wait_for(r"\[stopped\]\s+> ")
        typed.type("/quit\n")
        assert typed.process.wait(30) == 0
    _, second = roles(server)
    assert [role for role, _ in second] == ["user", "assistant", "user"]
    assert second[1][1].startswith("0 1 2 3 4 5 6 7 ")
