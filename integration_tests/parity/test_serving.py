"""The engine against transformers' `generate` on PyTorch, both in float32."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from stack_core.abi.generation import SamplingParams
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_train.huggingface import FORMAT

from ..generation import Continuation, complete, greedy

# Longrope is generated as far as kept keys are right; transformers goes on, and keeps keys of the short factors.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:.* generates up to 24 of its 96 positions")]

TOLERANCE = 1e-4
PROMPT = [7, 11, 13]
# Sequences of few tokens outgrow only small pages.
PAGE_TOKENS = {"tied": 1, "dynamic_rope": 1, "longrope": 1, "no_groups": 3, "one_kv_head": 16}


@dataclass(frozen=True)
class Served:
    """A model of transformers, and the engine that serves it.

    Attributes:
      end: its end token, which transformers gives after `PROMPT` as the fifth token.
      most_tokens: of a prompt and its continuation that both compute alike.
    """

    name: str
    torch_model: Any
    engine: LLMEngine
    end: int
    vocab_size: int
    most_tokens: int

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return torch.log_softmax(self.torch_model(torch.tensor([tokens])).logits[0], dim=-1).numpy()

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return [random.integers(0, self.vocab_size, length).tolist() for length in lengths]

    def assert_equal(self, prompt: list[int], continuation: Continuation) -> None:
        assert continuation.tokens == generated(self.torch_model, prompt, len(continuation.tokens))


def generated(torch_model: Any, prompt: list[int], count: int, **settings: Any) -> list[int]:
    """What transformers generates greedily."""
    tokens = torch_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def served(pair):
    """An engine for few tokens a step, with too few pages for all that it works on."""
    end = generated(pair.torch_model, PROMPT, 5)[-1]
    name = pair.directory.parent.name.rstrip("0123456789")
    checkpoint = dataclasses.replace(FORMAT.open_for_generation(pair.directory), end_tokens=frozenset({end}))
    page_tokens, most_tokens = PAGE_TOKENS.get(name, 4), checkpoint.max_positions
    pages = 2 * most_tokens // page_tokens
    config = EngineConfig(
        max_sequences=32, max_tokens=most_tokens, step_tokens=32, page_tokens=page_tokens, pages=pages
    )
    with LLMEngine(checkpoint, config) as engine:
        yield Served(name, pair.torch_model, engine, end, pair.config.vocab_size, most_tokens)


@pytest.mark.parametrize("prompt_tokens", [1, 7, 16])
def test_alone(served, prompt_tokens):
    (prompt,) = served.prompts(prompt_tokens)
    ((continuation,),) = complete(served.engine, [prompt], greedy(served.most_tokens - prompt_tokens))
    assert len(continuation.tokens) == served.most_tokens - prompt_tokens
    served.assert_equal(prompt, continuation)


def test_in_a_mixed_batch_of_32_that_has_too_few_pages(served):
    before = served.engine.stats()
    random = np.random.default_rng(2)
    most = min(80, served.most_tokens)
    prompts = served.prompts(*random.integers(1, most // 2, 32))
    # Answers outgrow the page that each running sequence has in reserve.
    counts = random.integers(most // 4, most // 2, 32).tolist()
    found = complete(served.engine, prompts, [greedy(count) for count in counts], in_one_turn=True)
    for prompt, count, (continuation,) in zip(prompts, counts, found, strict=True):
        assert len(continuation.tokens) == count
        served.assert_equal(prompt, continuation)
    after = served.engine.stats()
    assert after.preemptions > before.preemptions
    assert after.used_pages == 0


def test_with_a_prefix_that_was_kept(served):
    first, other = served.prompts(17, 1, seed=2)
    page_tokens = PAGE_TOKENS.get(served.name, 4)
    complete(served.engine, [first], greedy(2))
    for prompt in (first, first[:16] + other):
        ((continuation,),) = complete(served.engine, [prompt], greedy(3))
        assert continuation.last.cached_tokens == 16 // page_tokens * page_tokens
        served.assert_equal(prompt, continuation)


def test_up_to_an_end_token(served):
    prompts = [PROMPT, *served.prompts(5, 8, seed=3)]
    found = complete(served.engine, prompts, greedy(10, ignore_eos=False))
    assert found[0][0].last.finish_reason == "stop"
    for prompt, (continuation,) in zip(prompts, found, strict=True):
        assert continuation.tokens == generated(served.torch_model, prompt, 10, eos_token_id=served.end)


def test_log_probabilities(served):
    most = served.most_tokens
    prompts = served.prompts(most // 2, 1, 5, seed=4)
    sampling = SamplingParams(
        max_tokens=min(12, most // 2), seed=0, logprobs=5, prompt_logprobs=3, ignore_eos=True, repetition_penalty=1.2
    )
    for prompt, (continuation,) in zip(prompts, complete(served.engine, prompts, sampling), strict=True):
        expected = served.logprobs([*prompt, *continuation.tokens])[:-1]
        figures = [*continuation.updates[0].prompt_logprobs[1:], *continuation.logprobs]
        for figure, row in zip(figures, expected, strict=True):
            np.testing.assert_allclose(figure.logprob, row[figure.token], atol=TOLERANCE)
            tops, logprobs = zip(*figure.top, strict=True)
            np.testing.assert_allclose(logprobs, np.sort(row)[::-1][: len(tops)], atol=TOLERANCE)
            np.testing.assert_allclose(logprobs, row[list(tops)], atol=TOLERANCE)
