"""Writes the data of examples/shapes*.yaml and examples/captions.yaml: pictures of colored shapes, and a tokenizer.

    python examples/shapes.py [DIRECTORY] [PICTURES]

Each picture has one shape at a random place, of a random size, on a dark background, and a caption, such as "a red
circle" in `pictures/7.txt`. `edges/7.png` has its edges in white. `train.jsonl` has questions about the pictures. One
picture in eight is held out: `held_out.jsonl` has them with the same questions.
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter
from tokenizers import Tokenizer, models, pre_tokenizers, processors

COLORS = {"red": (220, 50, 50), "green": (60, 190, 70), "blue": (60, 80, 220), "yellow": (230, 210, 60)}
SHAPES = ("square", "circle", "triangle")
QUESTIONS = ("what color is it", "what shape is it")
SPECIAL = ("<pad>", "<end>", "<image>", "<soft>", "</image>", "<user>", "<assistant>")
SIDE = 32
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '> ' }}"
    "{% if message.content is string %}{{ message.content + ' ' }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text + ' ' }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/shapes-data")
    pictures = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    for folder in ("pictures", "edges"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    records = []
    for number in range(pictures):
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        path = f"pictures/{number}.png"
        picture = draw(shape, COLORS[color], rng)
        picture.save(directory / path)
        edges(picture).save(directory / "edges" / f"{number}.png")
        (directory / path).with_suffix(".txt").write_text(f"a {color} {shape}\n")
        order = rng.sample([(QUESTIONS[0], color), (QUESTIONS[1], shape)], 2)
        records.append({"messages": conversation(path, order)})
    write(directory / "held_out.jsonl", records[::8])
    write(directory / "train.jsonl", [record for place, record in enumerate(records) if place % 8])
    write_tokenizer(directory / "tokenizer")


def draw(shape: str, color: tuple[int, int, int], rng: random.Random) -> Image.Image:
    """Draws a shape with slightly varied colors."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randrange(40) for _ in range(3)))
    size = rng.randrange(12, 22)
    left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
    right, bottom = left + size, top + size
    fill = tuple(min(max(each + rng.randrange(-25, 26), 0), 255) for each in color)
    pen = ImageDraw.Draw(image)
    if shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)
    return image


def edges(picture: Image.Image) -> Image.Image:
    """Returns the edges of a picture: pixels with a neighbor of another brightness are white."""
    grey = picture.convert("L")
    contrast = ImageChops.difference(grey.filter(ImageFilter.MaxFilter(3)), grey.filter(ImageFilter.MinFilter(3)))
    return contrast.point(lambda value: 255 if value > 10 else 0)


def conversation(path: str, questions: list[tuple[str, str]]) -> list[dict[str, object]]:
    """Returns the messages about a picture; the first question comes with it."""
    messages: list[dict[str, object]] = []
    for place, (question, answer) in enumerate(questions):
        image = [] if place else [{"type": "image_url", "image_url": {"url": path}}]
        messages.append({"role": "user", "content": [*image, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": answer})
    return messages


def write(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer whose tokens are words; ids 2, 3 and 4 are the tokens of images."""
    words = sorted({word for question in QUESTIONS for word in question.split()})
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *words, *COLORS, *SHAPES, "a"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    # Text towers read the end of a caption; chats have their own end tokens.
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<end>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main()
