"""Writes what examples/chat_*.yaml learn from, text and chats about it, and asks a served model what it has learned.

    python examples/chat.py [DIRECTORY]
    python examples/chat.py ask ADDRESS [DIRECTORY]

The text is the Python standard library. A chat shows one of its short functions and asks for its name, an argument,
what it returns, or a word of its docstring; the answers stand in its code. Whole modules are held out: neither
their text nor their functions are in what is written for training.
"""

import ast
import hashlib
import json
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.data import Document
from stack_core.abi.plugins import registries

DIRECTORY = "runs/chat-data"
HELD_OUT_OF = 10  # one in so many modules is held out
FUNCTION_CHARACTERS = 320
RETURN_CHARACTERS = 32
QUESTIONS = {"chat": 6000, "held_out": 100}  # of each kind, at most
ALIKE = {"chat": 30, "held_out": 1}  # that have the same answer, so that knowing common ones helps little
ANSWER_TOKENS = 32
CLIENTS = 16
READY_S, REQUEST_S, POLL_S = 600, 600, 0.2

Message = Mapping[str, str]
Chat = Mapping[str, list[Message]]


def main() -> None:
    if sys.argv[1:2] == ["ask"]:
        print(json.dumps(ask(sys.argv[2], Path(sys.argv[3] if len(sys.argv) > 3 else DIRECTORY)), indent=2))
    else:
        write(Path(sys.argv[1] if len(sys.argv) > 1 else DIRECTORY), registries.data_sources["stdlib"]().documents())


def write(directory: Path, documents: Iterable[Document]) -> None:
    """Writes `text.jsonl`, `chat.jsonl` and `held_out.jsonl`, the same ones of the same documents."""
    directory.mkdir(parents=True, exist_ok=True)
    functions: dict[str, dict[str, Function]] = {"chat": {}, "held_out": {}}
    with (directory / "text.jsonl").open("w") as text:
        for document in documents:
            if is_held_out(document.name):
                part = "held_out"
            else:
                part = "chat"
                text.write(json.dumps({"text": document.text}) + "\n")
            functions[part] |= {function.code: function for function in functions_of(document.text)}
    for code in functions["chat"]:  # copies of a function are in many modules
        functions["held_out"].pop(code, None)
    for part, found in functions.items():
        made = chats(found.values(), QUESTIONS[part], alike=ALIKE[part], together=part == "chat")
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in made))


def is_held_out(name: str) -> bool:
    """Whether the module of a file is held out; the modules of a package stay together."""
    return digest(name.partition("/")[0].removesuffix(".py")) % HELD_OUT_OF == 1


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Function:
    """A function's source, and what may be asked about it, by question."""

    code: str
    answers: Mapping[str, str]


def functions_of(source: str) -> Iterator[Function]:
    """The short functions in the source of a module, methods included."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates among the library's files
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(code) <= FUNCTION_CHARACTERS and code.isascii() and code.startswith("def "):
                yield Function(code, dict(answers(node, lines)))


def answers(node: ast.FunctionDef, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Questions about a function and their answers, which stand in its source."""
    if not node.name.startswith("__"):
        yield "What is this function called?", node.name
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if arguments[1:]:
        yield "Which argument comes second?", arguments[1]
    returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
    if len(returned) == 1 and (value := returned[0]) is not None and value.lineno == value.end_lineno:
        text = lines[value.lineno - 1][value.col_offset : value.end_col_offset]
        if len(text) <= RETURN_CHARACTERS:
            yield "What does it return?", text
    words = (ast.get_docstring(node) or "").partition("\n")[0].split()
    if words[1:]:
        yield "What is the second word of its docstring?", words[1]


def chats(functions: Iterable[Function], of_kind: int, *, alike: int, together: bool) -> Iterator[Chat]:
    """Up to so many questions of each kind, in an order that depends on their texts alone.

    Args:
      alike: questions of a kind that have the same answer, at most.
      together: whether the questions about a function are turns of one chat, or a chat each.
    """
    asked = [(question, answer, each.code) for each in functions for question, answer in each.answers.items()]
    kinds: Counter[str] = Counter()
    copies: Counter[tuple[str, str]] = Counter()
    by_code: dict[str, list[tuple[str, str]]] = {}
    for question, answer, code in sorted(asked, key=lambda each: digest("\n".join(each))):
        if kinds[question] < of_kind and copies[question, answer] < alike:
            kinds[question] += 1
            copies[question, answer] += 1
            by_code.setdefault(code, []).append((question, answer))
    for code, pairs in by_code.items():
        for turns in [pairs] if together else ([pair] for pair in pairs):
            yield {"messages": list(messages_of(code, turns))}


def messages_of(code: str, pairs: Iterable[tuple[str, str]]) -> Iterator[Message]:
    """Questions and answers in turn; the code stands before the first."""
    shown = f"{code}\n\n"
    for question, answer in pairs:
        yield {"role": "user", "content": shown + question}
        yield {"role": "assistant", "content": answer}
        shown = ""


def ask(address: str, directory: Path) -> dict[str, float]:
    """What a server answers to the questions that were held out, greedily.

    Returns:
      Shares of the questions: with an answer that is not empty, that ended by itself, that is right to the letter, and
      of which the first line is right, whatever follows.
    """
    lines = (directory / "held_out.jsonl").read_text().splitlines()
    questions, answers = zip(*(json.loads(line)["messages"] for line in lines), strict=True)
    wait_for(address)
    with ThreadPoolExecutor(CLIENTS) as pool:
        choices = list(pool.map(lambda question: answer_of(address, question), questions))
    texts = [choice["message"]["content"].strip() for choice in choices]
    pairs = [(text, answer["content"]) for text, answer in zip(texts, answers, strict=True)]
    counts = {
        "not_empty": sum(map(bool, texts)),
        "ended": sum(choice["finish_reason"] == "stop" for choice in choices),
        "correct": sum(text == answer for text, answer in pairs),
        "first_line_correct": sum(text.partition("\n")[0].rstrip() == answer for text, answer in pairs),
    }
    return {"questions": len(texts), **{name: count / len(texts) for name, count in counts.items()}}


def wait_for(address: str) -> None:
    """Waits until a server has started and compiled its programs."""
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/ready", timeout=REQUEST_S).close()
            return
        except urllib.error.URLError as error:  # nobody listens yet, or status 503
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{address} is not ready after {READY_S} s: {error}.") from error
            time.sleep(POLL_S)


def answer_of(address: str, question: Message) -> Any:
    """A server's greedy answer, as a choice of OpenAI's chat completions."""
    body = {"messages": [question], "max_tokens": ANSWER_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        return json.load(response)["choices"][0]


if __name__ == "__main__":
    main()
