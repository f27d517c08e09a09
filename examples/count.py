"""Writes the data of examples/count_chat.yaml: pictures with answered questions about them, and a tokenizer.

    python examples/count.py [DIRECTORY] [PICTURES]

Questions ask for the number of shapes of a kind, as in the environment of examples/count.yaml.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from stack_core.abi.config import load_yaml, parse
from stack_rl.environments.count_shapes import CountShapesConfig

SPECIAL = ("<pad>", "<end>", "<image>", "<soft>", "</image>", "<user>", "<assistant>")
COLORS, SHAPES = ("red", "green", "blue", "yellow"), ("circles", "squares", "triangles")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '> ' }}"
    "{% if message.content is string %}{{ message.content + ' ' }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text + ' ' }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/count-data")
    pictures = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    # The environment of count.yaml draws its pictures from other seeds.
    recipe = load_yaml(Path(__file__).with_name("count.yaml"))
    environment = parse(CountShapesConfig, recipe["data"]["environment"])
    records = []
    for number in range(pictures):
        question = environment.question(number)
        path = f"pictures/{number}.png"
        question.picture.save(directory / path)
        content = [{"type": "image_url", "image_url": {"url": path}}, {"type": "text", "text": question.text}]
        answer = {"role": "assistant", "content": str(question.answer)}
        records.append({"messages": [{"role": "user", "content": content}, answer]})
    (directory / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_tokenizer(directory / "tokenizer")


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer whose tokens are words; ids 2, 3 and 4 are the tokens of images."""
    words = [*SPECIAL, "how", "many", "?", *COLORS, *SHAPES, *map(str, range(7))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<end>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main()
