"""Writes the data of examples/add.yaml: sums of two two-digit numbers, and a character tokenizer.

    python examples/add.py [DIRECTORY] [DEMONSTRATIONS]

Answers have three digits in reverse order, the order of computation: the answer to `37+45=` is `280`. One sum in eleven
is held out. The remaining sums are tasks, and the first DEMONSTRATIONS of them (by default all) are demonstrations too.
"""

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

CHARACTERS = "0123456789+="
END = "<end>"


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/add-data")
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(sums)
    held_out, others = sums[::11], [pair for place, pair in enumerate(sums) if place % 11]
    directory.mkdir(parents=True, exist_ok=True)
    shown = others[: int(sys.argv[2])] if len(sys.argv) > 2 else others
    write(directory / "demonstrations.jsonl", ({"prompt": p, "completion": a} for p, a in texts(shown)))
    write(directory / "tasks.jsonl", ({"prompt": p, "answer": a} for p, a in texts(others)))
    write(directory / "held_out.jsonl", ({"prompt": p, "answer": a} for p, a in texts(held_out)))
    write_tokenizer(directory / "tokenizer")


def texts(sums: Iterable[tuple[int, int]]) -> Iterable[tuple[str, str]]:
    return ((f"{a}+{b}=", f"{a + b:03}"[::-1]) for a, b in sums)


def write(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tokenizer(directory: Path) -> None:
    vocabulary = {character: place for place, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


if __name__ == "__main__":
    main()
