"""Checks the English of docstrings, comments and documents, and the names of the code, against a budget.

    python tools/prose.py            # what `nox -s lint` runs
    python tools/prose.py --list     # every place, to rewrite

A marker is a construction that is rare in the docstrings of Optax, Flax and Grain (6 per 1,000 words) and frequent in
translations. It is a place to look at, not a mistake: rewrite the sentence, do not swap the word. Budgets only fall.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Markers per 1,000 words, and odd names, that each part may have.
BUDGETS = {
    "packages/core": (8.0, 2),
    "packages/kernels": (5.5, 2),
    "packages/quant": (2.5, 2),
    "packages/train": (2.0, 4),
    "packages/rl": (6.0, 17),
    "packages/serve": (8.0, 1),
    "packages/profile": (5.0, 3),
    "docs README.md GLOSSARY.md CONTRIBUTING.md examples": (5.5, 5),
}

_MARKERS = [
    re.compile(pattern)
    for pattern in (
        r"^what\b",
        r"^(of (a|an|the|each|its|those|one)\b|those\b|that of\b|ones?\b (that|of|which))",
        r"^(how|where|whether|who|whose)\b",
        r"(?<!^)\bwhat (is|was|are|were|it|they|a|an|the|each|one|others?)\b",
        r"\b(those (of|that|which|who|whose)|that of|ones? (that|which|of)|the ones?)\b",
        r"\b(it|them|those|its own|their own|of|for|from|with|by|to|at|in)$",
        r"\b(is|are|has|have) no\b",
        r"\b(there (is|are) none|none where|none if|no more than|not (any|one) of)\b",
        r"\b(each (to|of|in|at|by) its|every one of|all that|all others?|the others?)\b",
        r"\b(is|are|was|were|be) (told|said|asked|meant|known|given|taken|made|held|kept|left|drawn|met|turned)\b",
        r"\b(beside|alone|whole|goes? on|went on|as it (is|was|stands)|as they (are|come|stand)|by itself|of itself)\b",
        r"\bso that\b",
    )
]
# Participles, adverbs and prepositions in the place of a noun or a verb.
_ODD_NAME = re.compile(
    r"most|fewest|least|given|wanted|wants|held|kept|shown|said|drawn|drawing|ended|further|taken|told|asked|"
    r"beside|others|theirs|ours|mine|own|here|alone|whole|facts|problems|findings|turned|moved|treatment|met|"
    r"summed|refused|described|placed|wider|narrow|aside|news|outcome|verdict|much|how|what|who|done"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SKIPPED = {"tests", ".nox", "results", "node_modules"}


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text in lower case, without code, formulas, addresses and names of arguments."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    if text.lstrip().startswith("#"):  # Markdown: indented blocks and tables of code
        text = re.sub(r"^( {4,}|\t).*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`|https?://\S+|\[[^\]]*\]|\([^)]*arXiv[^)]*\)", " X ", text)
    text = re.sub(r"^\s*[\w*, ]{1,30}:(?=\s)", " ", text, flags=re.MULTILINE)
    for part in re.split(r"(?<=[.:;!?])\s+|\n\s*\n|\n\s*[-*|] ?", text):
        words = re.findall(r"[A-Za-z']+", part)
        if len(words) > 1:
            yield " ".join(words).lower()


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring and comment, or of a whole Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type", "# noqa", "#!", "# ruff")):
            yield token.start[0], token.string.lstrip("# ")


def odd_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each function, class and parameter that contains an odd word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg)):
            name = node.arg if isinstance(node, ast.arg) else node.name
            if any(_ODD_NAME.fullmatch(word.lower()) for word in _WORD.findall(name)):
                yield node.lineno, name


def files_of(part: str) -> Iterator[Path]:
    for root in map(ROOT.joinpath, part.split()):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix in (".py", ".md") and not _SKIPPED & {*path.relative_to(ROOT).parts}:
                yield path


def measure(part: str) -> tuple[float, int, list[str]]:
    """Returns the markers per 1,000 words, the number of odd names, and a line for each."""
    words, markers, names, lines = 0, 0, 0, list[str]()
    for path in files_of(part):
        for line, text in texts(path):
            found = 0
            for sentence in sentences(text):
                words += len(sentence.split())
                found += sum(len(marker.findall(sentence)) for marker in _MARKERS)
            markers += found
            if found:
                lines.append(f"{path.relative_to(ROOT)}:{line}: {found} in: {' '.join(text.split())[:120]}")
        for line, name in odd_names(path):
            names += 1
            lines.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return 1000 * markers / max(words, 1), names, lines


def main() -> int:
    """Prints each part's figures; returns 1 if one exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every marker and odd name")
    arguments, over = parser.parse_args(), False
    for part, (max_markers, max_names) in BUDGETS.items():
        rate, names, lines = measure(part)
        over = over or rate > max_markers or names > max_names
        budget = f"(budget {max_markers:.1f} and {max_names})"
        print(f"{part}: {rate:.2f} markers per 1,000 words, {names} odd names {budget}")
        if arguments.list:
            print("\n".join(f"  {line}" for line in lines))
    if over:
        print("This exceeds the budget in tools/prose.py. `python tools/prose.py --list` shows the places to rewrite.")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
