"""Writes the training data of examples/chat_*.yaml and evaluates a served model on held-out questions.

    python examples/chat.py [DIRECTORY]
    python examples/chat.py ask ADDRESS [DIRECTORY]

The text is the Python standard library. A chat shows a short function and asks for its name, an argument, its return
value, or a word of its docstring; the function contains each answer. The split is by module: the training data contain
neither the text nor the functions of held-out modules.
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
HELD_OUT_OF = 10  # 1 in 10 modules is held out
FUNCTION_CHARACTERS = 320
RETURN_CHARACTERS = 32
QUESTIONS = {"chat": 6000, "held_out": 100}  # maximum number of questions of each kind
ALIKE = {"chat": 30, "held_out": 1}  # maximum per answer; guessing a frequent answer then scores little
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
    """Writes `text.jsonl`, `chat.jsonl` and `held_out.jsonl`, a deterministic function of the documents."""
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
    for code in functions["chat"]:  # several modules may contain copies of a function
        functions["held_out"].pop(code, None)
    for part, found in functions.items():
        made = chats(found.values(), QUESTIONS[part], alike=ALIKE[part], together=part == "chat")
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in made))


def is_held_out(name: str) -> bool:
    """Checks whether the module of a file is held out. All modules of a package are in the same split."""
    return digest(name.partition("/")[0].removesuffix(".py")) % HELD_OUT_OF == 1


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Function:
    """The source of a function, and its answers by question."""

    code: str
    answers: Mapping[str, str]


def functions_of(source: str) -> Iterator[Function]:
    """Yields the short functions in the source of a module, including methods."""
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
    """Yields questions about a function with their answers, which its source contains."""
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
    """Yields chats with up to `of_kind` questions of each kind, selected by a hash of their texts.

    Args:
      of_kind: maximum number of questions of each kind.
      alike: maximum number of questions of a kind with the same answer.
      together: whether all questions about a function are turns of one chat; otherwise, each is a separate chat.
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
    """Yields questions and answers in alternation; the first question begins with the code."""
    shown = f"{code}\n\n"
    for question, answer in pairs:
        yield {"role": "user", "content": shown + question}
        yield {"role": "assistant", "content": answer}
        shown = ""


def ask(address: str, directory: Path) -> dict[str, float]:
    """Evaluates a server's greedy answers to the held-out questions.

    Returns:
      The number of questions, and the fractions of answers that are not empty, ended before the token limit, are
      correct, and have a correct first line.
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
        except urllib.error.URLError as error:  # the port is not open yet, or status 503
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{address} is not ready after {READY_S} s: {error}.") from error
            time.sleep(POLL_S)


def answer_of(address: str, question: Message) -> Any:
    """Requests a greedy answer and returns it as a choice of OpenAI's chat completions."""
    body = {"messages": [question], "max_tokens": ANSWER_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        return json.load(response)["choices"][0]


if __name__ == "__main__":
    main()
