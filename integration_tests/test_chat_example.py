"""What examples/chat.py writes: questions about functions, whole modules held out."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack_core.contracts.data import Document

ROOT = Path(__file__).parents[1]
# A copy of a function of textwrap in a module of a package that is held out, beside a function of its own.
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


def messages(path: Path) -> list[tuple[str, str, str]]:
    """The code, the question and the answer of each chat."""
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chat in chats)
    return [(*user["content"].rsplit("\n\n", 1), assistant["content"]) for user, assistant in chats]


def test_whole_modules_are_held_out_of_what_is_trained_on(chat, tmp_path):
    given = list(documents())
    chat.write(tmp_path / "first", given)
    chat.write(tmp_path / "again", given)
    for name in ("text", "chat", "held_out"):
        assert (tmp_path / f"first/{name}.jsonl").read_bytes() == (tmp_path / f"again/{name}.jsonl").read_bytes()

    trained_on = [json.loads(line)["text"] for line in (tmp_path / "first/text.jsonl").read_text().splitlines()]
    assert trained_on == [given[0].text]
    trained, asked = (messages(tmp_path / f"first/{part}.jsonl") for part in ("chat", "held_out"))
    codes = {code for code, _, _ in trained}
    assert COPIED.rstrip() in codes
    assert not codes & {code for code, _, _ in asked}
    names = {code.partition("(")[0] for code, _, _ in asked}
    assert {"def keep", "def _destinsrc"} <= names
    assert "def copyfile" not in names, "it is not short"
    assert all(answer in code for code, _, answer in trained + asked)
    assert len({(question, answer) for _, question, answer in asked}) == len(asked), "each answer is another"


def test_what_is_asked_about_a_function(chat):
    (function,) = chat.functions_of(f"class Kept:\n    {OWN.replace(chr(10), chr(10) + '    ')}")
    assert function.code == OWN.rstrip()
    assert function.answers == {
        "What is this function called?": "keep",
        "Which argument comes after self?": "first",
        "What does it return?": "first",
        "What is the first word of its docstring?": "Holds",
    }
