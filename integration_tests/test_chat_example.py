"""From text to chat: what examples/chat.py writes, and the commands of docs/chat.md with what they promise."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack_core.abi.data import Document

ROOT = Path(__file__).parents[1]
# A held-out module with a copy of a function of textwrap and a function that no other module has.
COPIED = "def fill(text, width=70):\n    return wrapped(text, width)\n"
OWN = 'def keep(self, first, *rest):\n    """Holds it."""\n    return first\n'


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import chat

    return chat


def documents() -> Iterator[Document]:
    """Two modules of the standard library, one of which is held out, and one made for the test."""
    yield Document("textwrap.py", Path(textwrap.__file__).read_text() + COPIED)
    yield Document("shutil.py", Path(shutil.__file__).read_text())
    yield Document("json/made.py", COPIED + OWN)


def asked(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """The code of each chat, and its questions and answers in turn."""
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    found = []
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        contents = [message["content"] for message in chat]
        code, contents[0] = contents[0].rsplit("\n\n", 1)
        found.append((code, list(zip(contents[::2], contents[1::2], strict=True))))
    return found


def test_whole_modules_are_held_out_of_what_is_trained_on(chat, tmp_path):
    given = list(documents())
    chat.write(tmp_path / "first", given)
    chat.write(tmp_path / "again", given)
    for name in ("text", "chat", "held_out"):
        assert (tmp_path / f"first/{name}.jsonl").read_bytes() == (tmp_path / f"again/{name}.jsonl").read_bytes()

    trained_on = [json.loads(line)["text"] for line in (tmp_path / "first/text.jsonl").read_text().splitlines()]
    assert trained_on == [given[0].text]
    trained, held_out = (asked(tmp_path / f"first/{part}.jsonl") for part in ("chat", "held_out"))
    codes = {code for code, _ in trained}
    assert COPIED.rstrip() in codes
    assert len(codes) == len(trained), "all questions about a function are turns of one chat"
    assert any(len(turns) > 1 for _, turns in trained)
    assert not codes & {code for code, _ in held_out}
    names = {code.partition("(")[0] for code, _ in held_out}
    assert {"def keep", "def _destinsrc"} <= names
    assert "def copyfile" not in names, "it is not short"
    assert all(answer in code for code, turns in trained + held_out for _, answer in turns)
    assert all(len(turns) == 1 for _, turns in held_out)
    pairs = [turns[0] for _, turns in held_out]
    assert len(set(pairs)) == len(pairs), "each answer is another"


def test_what_is_asked_about_a_function(chat):
    (function,) = chat.functions_of(f"class Kept:\n    {OWN.replace(chr(10), chr(10) + '    ')}")
    assert function.code == OWN.rstrip()
    assert function.answers == {
        "What is this function called?": "keep",
        "Which argument comes second?": "first",
        "What does it return?": "first",
        "What is the second word of its docstring?": "it.",
    }


class Shell:
    """Runs the commands of docs/chat.md, servers on free ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._address = ""
        environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # some slow programs down
        path = f"{Path(sys.executable).parent}:{environ['PATH']}"
        self._environ = {**environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}  # nothing is compiled yet

    def run(self, line: str) -> str:
        """What a command wrote; what it took is kept in `took.txt`."""
        began_s, used_s = time.monotonic(), cpu_s()
        said = self._run(line)
        with (self._folder / "took.txt").open("a") as took:
            took.write(f"{time.monotonic() - began_s:.0f} s, {cpu_s() - used_s:.0f} s of CPU: {line}\n{said}")
        return said

    def _run(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        if words[:2] == ["stack", "serve"]:
            words[words.index("--port") + 1] = "0"
            command = [*words[: words.index("&")], "--json"]
            self._server = subprocess.Popen(
                command, cwd=self._folder, env=self._environ, stdout=subprocess.PIPE, text=True
            )
            assert self._server.stdout is not None
            self._address = json.loads(self._server.stdout.readline())["address"]
            return ""
        if words[:1] == ["kill"]:
            self.stop()
            return ""
        words = [self._address if word.startswith("http://") else word for word in words]
        done = subprocess.run(words, cwd=self._folder, env=self._environ, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    def stop(self) -> None:
        if self._server is not None:
            with self._server as server:
                server.terminate()
                assert server.wait(timeout=180) == 0
            self._server = None


def cpu_s() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_the_documented_commands_teach_a_model_to_chat(tmp_path):
    """Answers end, are right three times as often as before, and stay so in int8."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = re.search(r"(?:^    .+\n)+", (ROOT / "docs/chat.md").read_text(), re.MULTILINE)
    assert commands is not None
    shell, found, before_s = Shell(tmp_path), [], cpu_s()
    try:
        for line in commands[0].splitlines():
            said = shell.run(line.strip())
            if " ask " in line:
                found.append(json.loads(said))
    finally:
        shell.stop()
    assert cpu_s() - before_s < 2 * 15 * 60, "15 minutes on two cores"
    before, after, int8 = found
    assert min(after["not_empty"], after["ended"], int8["not_empty"], int8["ended"]) >= 0.95
    assert after["correct"] >= 3 * before["first_line_correct"]
    assert after["correct"] >= 0.8
    assert abs(int8["correct"] - after["correct"]) <= 0.02
