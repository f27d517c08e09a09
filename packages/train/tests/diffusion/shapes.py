"""Captioned pictures of coloured shapes, the parts of a tiny text-to-image model, and classifiers that read them."""

import json
from dataclasses import replace

import jax
import numpy as np
import tokenizers
from PIL import Image, ImageDraw
from sklearn.svm import SVC

from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion import clip, clip_vision, t5
from stack_train.diffusion.pipeline import Encoders
from stack_train.diffusion.pipeline_classes import PIPELINES
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoder, TextEncoders

from .motions import MOTIONS

SIZE = 16
SHAPES = ("circle", "square", "triangle", "bar", "ring")
COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 200, 30),
    "blue": (50, 70, 240),
    "yellow": (230, 220, 30),
    "purple": (190, 40, 220),
    "white": (235, 235, 235),
}
HELD_OUT = (("red", "ring"), ("green", "circle"), ("blue", "square"), ("yellow", "triangle"), ("purple", "bar"))
"""Pairs that no training image shows; each word of theirs is in others."""


def drawn(colour, shape, rng):
    """A shape on black, of a drawn size and place."""
    half = rng.uniform(4.0, 5.5)
    x, y = rng.uniform(half + 0.5, SIZE - half - 1.5, 2)
    scale = 4  # drawn large, so that edges are smooth
    large = Image.new("RGB", (SIZE * scale, SIZE * scale))
    pen = ImageDraw.Draw(large)
    left, top, right, bottom = ((place + side * half) * scale for side in (-1, 1) for place in (x, y))
    match shape:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        case "square":
            pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        case "triangle":
            pen.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=COLOURS[colour])
        case "bar":
            middle = (top + bottom) / 2
            pen.rectangle((left, middle - 1.6 * scale, right, middle + 1.6 * scale), fill=COLOURS[colour])
        case "ring":
            pen.ellipse((left, top, right, bottom), outline=COLOURS[colour], width=int(1.8 * scale))
    return np.asarray(large.resize((SIZE, SIZE), Image.Resampling.BOX))


def caption(colour, shape):
    return f"a {colour} {shape}"


def pairs():
    return [(colour, shape) for colour in COLOURS for shape in SHAPES]


def write_images(folder, count, *, seed=0):
    """Images of all pairs but the held-out ones; half have their caption beside them, half in `metadata.jsonl`."""
    folder.mkdir(parents=True)
    rng, shown = np.random.default_rng(seed), [pair for pair in pairs() if pair not in HELD_OUT]
    lines = []
    for number in range(count):
        pair = shown[number % len(shown)]
        Image.fromarray(drawn(*pair, rng)).save(folder / f"{number:04}.png")
        if number % 2:
            (folder / f"{number:04}.txt").write_text(caption(*pair) + "\n")
        else:
            lines.append(json.dumps({"file_name": f"{number:04}.png", "text": caption(*pair)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def word_tokenizer():
    words = ["<pad>", "<end>", "<unknown>", "a", *COLOURS, *SHAPES, "moves", *MOTIONS]
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unknown>")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(["<pad>", "<end>"])
    built.post_processor = tokenizers.processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    settings = {"eos_token": "<end>", "pad_token": "<pad>"}
    return HuggingFaceTokenizer(
        {"tokenizer.json": built.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}, "words"
    )


def encoders(directory, autoencoder, *, width=32, tokens=6, name="FluxPipeline"):
    """Text encoders of a pipeline with random weights around an autoencoder; `directory` need not be there."""
    tokenizer, words = word_tokenizer(), 32
    floats = {"dtype": "float32", "param_dtype": "float32"}
    clip_config = clip.ClipTextConfig(
        vocab_size=words,
        embed=width,
        mlp=width,
        layers=1,
        heads=2,
        max_positions=tokens,
        end=1,
        projection=width,
        **floats,
    )
    (pipeline,) = [each for each in PIPELINES if each.name == name]
    t5_width = 2 * width if pipeline.joins_tokens else width  # of two CLIPs, whose tokens T5's follow
    t5_config = t5.T5EncoderConfig(
        vocab_size=words, embed=t5_width, mlp=width, layers=1, heads=2, head_dim=16, buckets=8, max_distance=8, **floats
    )
    clip_config = replace(clip_config, initializer_std=0.3)
    configs = (
        (clip.COMPONENT, clip_config),
        (clip.PROJECTED, replace(clip_config, projects=True)),
        (t5.COMPONENT, t5_config),
        (t5.UMT5, replace(t5_config, layer_biases=True, pad_id=0)),
    )
    made = {}
    for number, (folder, (component, _)) in enumerate(pipeline.text.items()):
        config = next(config for each, config in configs if each is component)
        model = component.family.build(config, key=jax.random.key(number))
        made[folder] = TextEncoder(model, PromptTokenizer(tokenizer, folder, tokens, 0))
    image = None
    if pipeline.image_encoder is not None:
        image_config = clip_vision.ClipImageConfig(
            embed=8, mlp=8, layers=2, heads=2, image_size=10, patch=5, initializer_std=0.3, **floats
        )
        image_model = clip_vision.FAMILY.build(image_config, key=jax.random.key(len(made)))
        image = clip_vision.ImageEncoder(image_model, image_config)
    text = TextEncoders(made, pipeline.condition, pipeline.clean, pipeline.counts_tokens)
    return Encoders(directory, autoencoder, text, pipeline, image)


def drawn_of_each_pair(count, *, seed=1):
    """The pairs, `count` times each, and an image of each entry."""
    rng, shown = np.random.default_rng(seed), [pair for pair in pairs() for _ in range(count)]
    return shown, np.stack([drawn(*pair, rng) for pair in shown])


class Reader:
    """Reads colour and shape of images, by support vector machines that were trained on images of known pairs."""

    def __init__(self, shown, images):
        self._colour = SVC().fit(self._mean_colours(images), [colour for colour, _ in shown])
        self._shape = SVC(C=10.0).fit(self._outlines(images), [shape for _, shape in shown])

    def __call__(self, images):
        """(colour, shape) of each image."""
        colours, shapes = self._colour.predict(self._mean_colours(images)), self._shape.predict(self._outlines(images))
        return list(zip(colours.tolist(), shapes.tolist(), strict=True))

    @staticmethod
    def _mean_colours(images):
        bright = images.max(-1, keepdims=True) > 100
        return (images * bright).sum((1, 2)) / np.maximum(bright.sum((1, 2)), 1) / 255.0

    @staticmethod
    def _outlines(images):
        """How bright each pixel is beside the brightest, in the frame that the shape fills."""
        light = images.max(-1) / 255.0
        found = []
        for each in light:
            rows, columns = np.nonzero(each > 0.35)
            if not len(rows):
                found.append(np.zeros((12, 12)))
                continue
            part = each[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            centred = np.zeros((SIZE, SIZE))
            top, left = (SIZE - part.shape[0]) // 2, (SIZE - part.shape[1]) // 2
            centred[top : top + part.shape[0], left : left + part.shape[1]] = part / part.max()
            found.append(centred[2:14, 2:14])
        return np.stack(found).reshape(len(images), -1)
