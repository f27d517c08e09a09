"""Writes the data of the examples `letters_*`: pairs of four-letter answers; the one of larger value is chosen.

    python examples/letters.py [DIRECTORY]

Each letter has a value from 0 to 7. The value of an answer is the sum over its letters, independent of the prompt:
`cchh` has value 18.
"""

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

LETTERS = "abcdefgh"
END = "<end>"
PAIRS = 2000


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/letters-data")
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    pairs = [pair(rng) for _ in range(PAIRS)]
    write(directory / "pairs.jsonl", pairs)
    answers = (each["chosen"] if place % 2 else each["rejected"] for place, each in enumerate(pairs))
    prompts = (each["prompt"] for each in pairs)
    write(directory / "answers.jsonl", ({"prompt": p, "completion": a} for p, a in zip(prompts, answers, strict=True)))
    write(directory / "prompts.jsonl", ({"prompt": f"{letter}:"} for letter in LETTERS))
    write_tokenizer(directory / "tokenizer")


def pair(rng: random.Random) -> Mapping[str, str]:
    """Samples a prompt with two answers of different values."""
    prompt = f"{rng.choice(LETTERS)}:"
    while True:
        answers = sorted(("".join(rng.choices(LETTERS, k=4)) for _ in range(2)), key=value)
        if value(answers[0]) < value(answers[1]):
            return {"prompt": prompt, "chosen": answers[1], "rejected": answers[0]}


def value(answer: str) -> int:
    return sum(LETTERS.find(each) for each in answer)


def worth(completion: Any) -> float:
    """The true reward behind the pairs, which the reward model must learn; 0 unless an answer has four letters."""
    return float(value(completion.text)) if len(completion.text) == 4 else 0.0


def write(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(LETTERS + ":")}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


if __name__ == "__main__":
    main()
