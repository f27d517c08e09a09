"""Serving of language models whose images have a token of text after each row of image tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.generation import SamplingParams
from stack_serve.llm.language_model import LLM
from stack_train.generation.generative import generative_checkpoint

from .seeing import TEMPLATE, make_model, make_row_config, png, question, write_tokenizer

# "?" and "!" stand for the tokens after rows and images, and <pix> for the tokens of an image.
IMAGE, BREAK, END = 4, 8, 9
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={IMAGE: -1e4})
# Images of up to 16 tokens are divided between steps of 12 tokens and pages of 4.
SETTINGS = {"max_sequences": 4, "step_tokens": 12, "page_tokens": 4, "decode_repeats": 2}
SIZES = [(24, 24), (12, 30), (6, 6), (20, 7)]
GRIDS = [(4, 4), (2, 4), (1, 1), (4, 2)]


def picture(number):
    """A picture of its own size."""
    return png(np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3), np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    # Images follow each other without text.
    write_tokenizer(directory, TEMPLATE.replace("<img> ", "<pix> "))
    config = make_row_config(initializer_std=0.5)
    return generative_checkpoint(make_model(config), config, name="eyes", tokenizer=directory, origin=None)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **SETTINGS) as llm:
        yield llm


CONVERSATIONS = [
    (question("which color", picture(0)), [0]),
    (question("which shape is it", picture(1), picture(3)), [1, 3]),
    (question("which color"), []),
    (
        [*question("is it red", picture(2)), {"role": "assistant", "content": "green"}, *question("is it", picture(0))],
        [2, 0],
    ),
]


@pytest.mark.slow  # starts another engine; the tests of images in grids serve a similar model
def test_answers_are_those_of_the_model_without_pages(llm, checkpoint):
    outputs = llm.chat([messages for messages, _ in CONVERSATIONS], GREEDY)

    @jax.jit
    def logits(params, tokens, pixels, grids):
        model = checkpoint.model(params)
        return model.logits(model(tokens, jnp.arange(64)[None], pixels=pixels, grids=grids).hidden[0])

    for output, (_, numbers) in zip(outputs, CONVERSATIONS, strict=True):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        rows = [row for number in numbers for row in [GRIDS[number][1]] * GRIDS[number][0]]
        ends = np.array([token for token in prompt if token in (BREAK, END)])
        assert list(prompt).count(IMAGE) == sum(rows) and len(ends) == len(rows)
        assert (ends == END).sum() == len(numbers)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        images = [checkpoint.images.read(picture(number)) for number in numbers]
        assert [image.grid for image in images] == [GRIDS[number] for number in numbers]
        pixels, grids = np.zeros((1, 4 * 32, 27), np.uint8), np.zeros((1, 2, 2), np.int32)
        if images:
            packed = np.concatenate([image.pixels for image in images])
            pixels[0, : len(packed)], grids[0, : len(images)] = packed, [image.grid for image in images]
        found = np.array(logits(checkpoint.load_params(), tokens, pixels, grids))[len(prompt) - 1 :]
        found[:, IMAGE] = -np.inf
        assert tuple(found[: len(answer)].argmax(axis=-1).tolist()) == answer
    # From the prefix cache, which ends in the image, the answer stays the same.
    hits = llm._engine.stats().prefix_hits_tokens
    again = llm.chat(CONVERSATIONS[0][0], GREEDY)
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert llm._engine.stats().prefix_hits_tokens > hits
    # Another picture has another answer or other probabilities.
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    first, second = (llm.chat(question("which color", picture(number)), one)[0] for number in (0, 2))
    assert first.outputs[0].logprobs[0].top != second.outputs[0].logprobs[0].top
