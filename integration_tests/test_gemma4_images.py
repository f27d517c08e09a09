"""Serving of Gemma 4, whose images have different numbers of tokens with the positions of text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ChatTemplateError
from stack_core.abi.generation import SamplingParams
from stack_quant.model import quantize_model
from stack_serve.llm.language_model import LLM
from stack_train.generation.generative import generative_checkpoint

from .seeing import TEMPLATE, make_gemma4_config, make_model, png, question, write_tokenizer

BEGIN, IMAGE, END = 3, 4, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={IMAGE: -1e4})
# A step has room for one whole image.
SETTINGS = {"max_sequences": 2, "step_tokens": 72, "page_tokens": 8, "decode_repeats": 2}
SIZES = [(13, 20), (3, 40), (24, 24)]
GRIDS = [(6, 10), (2, 30), (8, 8)]
SEQ = 160


def picture(number):
    """A picture of its own size."""
    return png(np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3), np.uint8))


CONVERSATIONS = [
    (question("which color", picture(0)), [0]),
    (question("which shape is it", picture(1), picture(2)), [1, 2]),
    (question("which color"), []),
]


def make_checkpoint(directory, two_way_images, *, quantized=False):
    write_tokenizer(directory, TEMPLATE.replace("<img> ", "<pix> "))
    config = make_gemma4_config(initializer_std=0.3, two_way_images=two_way_images)
    model = make_model(config)
    if quantized:
        sample = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "positions")}
        model = quantize_model(model, [{"path": "blocks/.*", "weights": "int8", "activations": "int8"}], sample)
    return generative_checkpoint(model, config, name="eyes", tokenizer=directory, origin=None)


def check_answers(checkpoint, outputs, tolerance=0.0):
    """Checks that each token is the most likely one of the model without a cache, up to a tolerance."""

    @jax.jit
    def logits(params, tokens, pixels, grids):
        model = checkpoint.model(params)
        return model.logits(model(tokens, jnp.arange(SEQ)[None], pixels=pixels, grids=grids).hidden[0])

    for output, (_, numbers) in zip(outputs, CONVERSATIONS, strict=True):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert list(prompt).count(IMAGE) == sum(np.prod(GRIDS[number]) for number in numbers)
        assert list(prompt).count(BEGIN) == list(prompt).count(END) == len(numbers)
        tokens = np.zeros((1, SEQ), np.int32)
        tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        images = [checkpoint.images.read(picture(number)) for number in numbers]
        pixels, grids = np.zeros((1, 140 * 4, 27), np.uint8), np.zeros((1, 2, 2), np.int32)
        if images:
            packed = np.concatenate([image.pixels for image in images])
            pixels[0, : len(packed)], grids[0, : len(images)] = packed, [GRIDS[number] for number in numbers]
        found = np.array(logits(checkpoint.load_params(), tokens, pixels, grids))[len(prompt) - 1 :][: len(answer)]
        found[:, IMAGE] = -np.inf
        assert len(answer) == 6
        assert (found.max(axis=-1) - found[np.arange(6), list(answer)] <= tolerance).all()


@pytest.mark.parametrize(
    "two_way", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["two_way", "causal"]
)  # the causal model starts another engine
def test_answers_are_those_of_the_model_without_pages(two_way, tmp_path):
    checkpoint = make_checkpoint(tmp_path, two_way)
    with LLM(checkpoint, **SETTINGS) as llm:
        outputs = llm.chat([messages for messages, _ in CONVERSATIONS], GREEDY)
        check_answers(checkpoint, outputs)
        # From the prefix cache, the answer stays the same.
        again = llm.chat(CONVERSATIONS[0][0], GREEDY)
        assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert llm._engine.stats().prefix_hits_tokens > 0
        # Another picture of the same size has other probabilities.
        one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
        other = png(np.random.default_rng(9).integers(0, 256, (*SIZES[0], 3), np.uint8))
        first, second = (llm.chat(question("which color", each), one)[0] for each in (picture(0), other))
        assert first.outputs[0].logprobs[0].top != second.outputs[0].logprobs[0].top
        for kind in ("input_audio", "video_url"):
            with pytest.raises(ChatTemplateError, match=f"messages.0.content.0 is of type '{kind}'"):
                llm.chat([{"role": "user", "content": [{"type": kind, kind: {}}]}], GREEDY)


@pytest.mark.slow  # starts another engine
def test_a_quantized_decoder_answers_as_without_pages(tmp_path):
    checkpoint = make_checkpoint(tmp_path, True, quantized=True)
    with LLM(checkpoint, **SETTINGS) as llm:
        check_answers(checkpoint, llm.chat([messages for messages, _ in CONVERSATIONS], GREEDY), tolerance=0.1)
