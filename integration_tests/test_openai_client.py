"""OpenAI's own client against `stack serve` of a tiny Llama with random weights, in a process of its own."""

import concurrent.futures
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from tokenizers import pre_tokenizers

from stack_core.abi.model_formats import open_for_generation

from .served import KEY, SPECIAL, Served, write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    options = ("--max-sequences", "4", "--step-tokens", "16", "--max-waiting", "8", "--api-key", KEY)
    served = Served(directory, *options, "--model-name", "tiny", "--model-name", "other")
    yield served
    assert "Traceback" not in served.stop()


def complete(served: Served, prompt: Any = "abc", **options: Any) -> Any:
    return served.openai.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 8, **options})


def chat(served: Served, **options: Any) -> Any:
    messages = [{"role": "user", "content": "abc"}]
    return served.openai.chat.completions.create(
        model="tiny", messages=messages, **{"max_completion_tokens": 8, **options}
    )


def test_models(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["tiny", "other"]
    assert served.openai.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        served.openai.models.retrieve("gpt-4")


def test_greedy_text_is_the_same_in_every_form(served: Served) -> None:
    whole = complete(served, temperature=0)
    tokens = httpx2.post(
        f"{served.address}/tokenize", json={"prompt": "abc"}, headers={"Authorization": f"Bearer {KEY}"}
    ).json()["tokens"]
    assert complete(served, tokens, temperature=0).choices[0].text == whole.choices[0].text
    assert whole.usage.prompt_tokens == len(tokens) and whole.usage.completion_tokens == 8
    both = complete(served, ["abc", "abc"], temperature=0, n=2)
    assert {choice.text for choice in both.choices} == {whole.choices[0].text}
    stream = complete(served, temperature=0, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(tokens), 8)


def test_offsets_and_fields_of_vllm_through_the_client(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert chat(served, tools=tools, tool_choice="none", temperature=0).choices[0].message.content is not None
    options = {"temperature": 1.0, "seed": 3, "logprobs": 0, "max_tokens": 24}
    (whole,) = complete(served, **options, extra_body={"ignore_eos": True}).choices
    offsets = whole.logprobs.text_offset
    assert offsets == sorted(offsets) and len(offsets) == 24 and offsets[-1] <= len(whole.text)
    chunks = list(complete(served, **options, stream=True, extra_body={"ignore_eos": True}))
    assert [place for chunk in chunks for place in chunk.choices[0].logprobs.text_offset] == offsets
    best = complete(served, **options, n=1, best_of=3)
    assert len(best.choices) == 1 and best.usage.completion_tokens > len(best.choices[0].logprobs.tokens)
    ends = {"logit_bias": {"1": 100}, "max_tokens": 4}  # a bias to the end token
    assert complete(served, **ends).usage.completion_tokens == 1
    body = {"ignore_eos": True, "skip_special_tokens": False}
    assert complete(served, **ends, extra_body=body).choices[0].text == 4 * SPECIAL[1]
    masked = complete(served, **ends, extra_body={**body, "min_tokens": 4}).choices[0]
    assert SPECIAL[1] not in masked.text and masked.finish_reason == "length"


def test_messages_stream(served: Served) -> None:
    whole = chat(served, temperature=0)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    chunks = list(chat(served, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_streaming_helper_of_the_client(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "abc"}]
    ends = {"1": 100}  # bias to the end token
    with served.openai.chat.completions.stream(model="tiny", messages=messages, logit_bias=ends) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop" and final.choices[0].message.content == ""


def test_embeddings_equal_the_hidden_states_of_the_model(served: Served, directory: Path) -> None:
    checkpoint = open_for_generation(str(directory))
    assert checkpoint.tokenizer is not None
    texts = ["abc", "a", "Embeddings of " + 20 * "text "]
    model = checkpoint.model(checkpoint.load_params())
    hidden_of = jax.jit(lambda tokens: model(tokens, jnp.arange(128)[None]).hidden[0])
    expected = []
    for text in texts:
        tokens = checkpoint.tokenizer.encode(text)
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        last = np.asarray(hidden_of(padded)[len(tokens) - 1], np.float64)
        expected.append(last / np.linalg.norm(last))
    # The client asks for base64 unless it is given a format.
    for encoding in ({}, {"encoding_format": "float"}):
        answer = served.openai.embeddings.create(model="tiny", input=texts, **encoding)
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(checkpoint.tokenizer.encode(text)) for text in texts)
    short = served.openai.embeddings.create(model="tiny", input="abc", dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, expected[0][:8] / np.linalg.norm(expected[0][:8]), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="embeddings have 32"):
        served.openai.embeddings.create(model="tiny", input="abc", dimensions=33)


def test_seeds_and_n(served: Served) -> None:
    first, again = (chat(served, seed=5, n=3) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) == 3
    assert first.usage.completion_tokens == 24


def test_logprobs(served: Served) -> None:
    answer = chat(served, logprobs=True, top_logprobs=3, temperature=0)
    for token in answer.choices[0].logprobs.content:
        assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 3 and sum(np.exp(each.logprob) for each in token.top_logprobs) <= 1
    scored = complete(served, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert scored.text == "abc" and scored.logprobs.tokens == ["<s>", "ab", "c"]
    assert scored.logprobs.token_logprobs[0] is None and all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    whole = complete(served, "abc", logprobs=0, temperature=0, max_tokens=3).choices[0]
    echoed = complete(served, "abc" + whole.text, echo=True, max_tokens=0, logprobs=0, temperature=0).choices[0]
    if echoed.logprobs.tokens[3:] == whole.logprobs.tokens:
        np.testing.assert_allclose(echoed.logprobs.token_logprobs[3:], whole.logprobs.token_logprobs, atol=1e-4)


def test_a_part_of_a_character_has_its_own_bytes(served: Served) -> None:
    first = len(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet()).index("\u00c3")  # how byte 0xC3 is written
    answer = chat(served, logprobs=True, logit_bias={str(first): 100}, max_completion_tokens=1)
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.bytes) == ("\ufffd", [0xC3])


def test_stop(served: Served) -> None:
    text = complete(served, temperature=0, max_tokens=40).choices[0].text
    stop = text[5:7]
    choice = complete(served, temperature=0, max_tokens=40, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    kept = complete(served, temperature=0, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize(
    "setting",
    [
        {"logit_bias": {"70": 100}},
        {"presence_penalty": 2.0, "logit_bias": {"70": 50}},
        {"frequency_penalty": 2.0, "logit_bias": {"70": 5}},
        {"extra_body": {"repetition_penalty": 5.0}},
        {"extra_body": {"stop_token_ids": list(range(4, 30))}},
        {"max_tokens": 3},
    ],
)
def test_what_is_accepted_takes_effect(served: Served, setting: dict[str, Any]) -> None:
    usual = complete(served, temperature=0, max_tokens=48)
    assert complete(served, **{"temperature": 0, "max_tokens": 48, **setting}).choices[0].text != usual.choices[0].text


def test_narrow_sampling_is_greedy(served: Served) -> None:
    greedy = complete(served, temperature=0).choices[0].text
    for setting in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert complete(served, temperature=3.0, seed=1, **setting).choices[0].text == greedy
    assert complete(served, temperature=3.0, seed=1).choices[0].text != greedy


def test_errors_are_the_clients_own(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        complete(served, "x" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="does not read tools"):
        chat(served, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model="gpt-4", prompt="x")
    stranger = served.openai.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_client_that_leaves_frees_its_pages(served: Served) -> None:
    stream = chat(served, stream=True, max_completion_tokens=500, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    served.wait_for_metric("vllm:num_requests_running", 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0


def test_a_full_queue_is_429(served: Served) -> None:
    long = {"max_completion_tokens": 480, "n": 4, "extra_body": {"ignore_eos": True}}

    def retry_after_s(_: int) -> int:
        try:
            chat(served, **long)
        except openai.RateLimitError as error:
            return int(error.response.headers["retry-after"])
        return 0

    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        found = list(clients.map(retry_after_s, range(8)))
    assert 0 in found and max(found) >= 1
    served.wait_for_metric("vllm:num_requests_running", 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.slow  # starts another server; packages/serve/tests/openai/test_server.py has one with a fake engine
def test_sigterm_lets_answers_end(directory: Path) -> None:
    server = Served(directory, "--max-sequences", "4", "--step-tokens", "16")
    stream = server.openai.completions.create(
        model=server.model, prompt="abc", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 0 and "Traceback" not in errors
    server.openai.close()
