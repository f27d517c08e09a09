import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from stack_core.abi.generation import GenerationRequest, GenerationUpdate

from .conftest import Served
from .fake_engine import EOS, FakeEngine, checkpoint

PATH = "/v1/completions"
HELLO, WORLD, SNOWMAN = 261, 262, 264


def spell(*tokens: int) -> Callable[[GenerationRequest, int], Iterator[int]]:
    """A script that repeats the same tokens."""
    return lambda request, index: itertools.cycle(tokens)


def test_a_text_is_continued(server: Served) -> None:
    answer = server.complete()
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    assert len(choice["text"]) == 4 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hello", [(256, 261)]),
        (["hello", "b"], [(256, 261), (256, 98)]),
        ([7, 8, 9], [(7, 8, 9)]),
        ([[7, 8], [9]], [(7, 8), (9,)]),
    ],
)
def test_prompts_have_four_forms(server: Served, prompt: Any, tokens: list[tuple[int, ...]]) -> None:
    answer = server.complete(prompt=prompt, n=2)
    assert [request.prompt for request in server.engine.submitted] == tokens
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(tokens)))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == len(texts), "each continuation is its own"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert answer["usage"]["completion_tokens"] == 8 * len(tokens)


def test_special_tokens_can_be_left_out(server: Served) -> None:
    server.complete(add_special_tokens=False)
    assert server.engine.submitted[0].prompt == (HELLO,)


def test_a_stream_says_the_same_as_the_whole_answer(server: Served) -> None:
    whole = server.complete(n=2, seed=3, max_tokens=9)
    events = server.events(PATH, prompt="hello", n=2, seed=3, max_tokens=9)
    for choice in whole["choices"]:
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {event["id"] for event in events} == {events[0]["id"]} and all("usage" not in event for event in events)


def test_usage_is_streamed_where_it_is_wanted(server: Served) -> None:
    *chunks, last = server.events(PATH, prompt="hello", max_tokens=3, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3 and last["usage"]["prompt_tokens"] == 2
    assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = server.events(PATH, prompt="hello", max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


def test_stop_texts_and_tokens_end_a_text(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(*b"abcdef")))
    (choice,) = server.complete(stop="cd", max_tokens=20)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    (choice,) = server.complete(stop_token_ids=[100], max_tokens=20)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcd", "stop", 100)
    events = server.events(PATH, prompt="x", stop=["zz", "cd"], max_tokens=20)
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert events[-1]["choices"][0]["stop_reason"] == "cd"


def test_usage_counts_the_tokens_of_a_stop_text(serve: Callable[..., Served]) -> None:
    class HoldsBack(FakeEngine):
        """Tells nothing of the last token where a stop text ends with it, as engines do."""

        def _next(self, made: Any) -> GenerationUpdate:
            update = super()._next(made)
            return replace(update, tokens=(), dropped_tokens=1) if made.stop.found else update

    server = serve(HoldsBack(spell(*b"abc")))
    answer = server.complete(stop="c", max_tokens=20, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [97, 98] and answer["usage"]["completion_tokens"] == 3
    options = {"include_usage": True}
    assert server.events(PATH, prompt="x", stop="c", stream_options=options)[-1]["usage"]["completion_tokens"] == 3


def test_the_model_ends_a_text(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(97, EOS)))
    (choice,) = server.complete()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    assert server.complete(ignore_eos=True)["choices"][0]["finish_reason"] == "length"


def test_characters_are_whole(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(*"h\N{GRINNING FACE}é".encode())))
    events = server.events(PATH, prompt="x", max_tokens=7)
    assert [event["choices"][0]["text"] for event in events] == ["h", "\N{GRINNING FACE}", "é"]


def test_logprobs(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(HELLO, 98)))
    (choice,) = server.complete(logprobs=2, max_tokens=2)["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 5],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["hello", "b"],
        "top_logprobs": [{"<|system|>": -0.25, "hello": -0.5}, {"a": -0.25, "b": -0.5}],
    }
    (choice,) = server.complete(logprobs=0, max_tokens=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"hello": -0.5}]
    events = server.events(PATH, prompt="x", logprobs=1, max_tokens=3)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [part["text_offset"] for part in parts] == [[0], [5], [6]]
    assert [part["tokens"] for part in parts] == [["hello"], ["b"], ["hello"]]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_text(serve: Callable[..., Served], as_ids: bool) -> None:
    script = [HELLO, *"\N{GRINNING FACE}é".encode(), SNOWMAN, 98, EOS]
    server = serve(FakeEngine(lambda request, index: iter(script)))
    body: dict[str, Any] = {"logprobs": 0, "max_tokens": 10, "return_tokens_as_token_ids": as_ids}
    (choice,) = server.complete(**body)["choices"]
    assert choice["text"] == "hello\N{GRINNING FACE}é\N{SNOWMAN}b" and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["text_offset"] == [0, 5, 5, 5, 5, 6, 6, 7, 8, 9]
    body |= {"prompt": "hello<|user|>\N{SNOWMAN}b", "echo": True}
    (choice,) = server.complete(**body)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [0, 0, 5, 13, 14, *(15 + offset for offset in [0, 5, 5, 5, 5, 6, 6, 7, 8, 9])]
    for echo in (False, True):
        (whole,) = server.complete(**{**body, "echo": echo})["choices"]
        parts = [event["choices"][0] for event in server.events(PATH, **{**body, "echo": echo})]
        assert "".join(part["text"] for part in parts) == whole["text"]
        streamed = itertools.chain(*(part["logprobs"]["text_offset"] for part in parts))
        assert list(streamed) == whole["logprobs"]["text_offset"]


def test_a_character_that_the_prompt_begins_is_whole_in_the_text(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(lambda request, index: iter([0x98, 0x80, 33])))
    prompt = [98, 0xF0, 0x9F]
    for body, text in (({}, "\N{GRINNING FACE}!"), ({"echo": True}, "b\N{GRINNING FACE}!")):
        (choice,) = server.complete(prompt=prompt, max_tokens=3, logprobs=0, **body)["choices"]
        assert choice["text"] == text
        events = server.events(PATH, prompt=prompt, max_tokens=3, **body)
        assert "".join(event["choices"][0]["text"] for event in events) == text
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_special_tokens_are_shown_if_they_are_not_skipped(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(98, 0xC3, 258, HELLO)))
    for skip, text in ((True, "b\N{REPLACEMENT CHARACTER}hello"), (False, "b\N{REPLACEMENT CHARACTER}<|user|>hello")):
        (choice,) = server.complete(skip_special_tokens=skip, spaces_between_special_tokens=False)["choices"]
        assert choice["text"] == text
        assert server.engine.submitted[-1].sampling.skip_special_tokens is skip


def test_the_best_of_several_continuations_are_answered(serve: Callable[..., Served]) -> None:
    class Ranked(FakeEngine):
        """The third continuation is the most likely, then the first."""

        def _next(self, made: Any) -> GenerationUpdate:
            update = super()._next(made)
            logprob = (-2.0, -3.0, -1.0)[made.index]
            return replace(update, logprobs=tuple(replace(each, logprob=logprob) for each in update.logprobs or ()))

    server = serve(Ranked(lambda request, index: itertools.repeat(97 + index)))
    for wanted, texts in ((1, ["cc"]), (2, ["cc", "aa"])):
        answer = server.complete(n=wanted, best_of=3, max_tokens=2)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
        assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 6
    (choice,) = server.complete(best_of=3, max_tokens=1, logprobs=0, prompt=["x"])["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0]
    assert "cannot be streamed" in server.refused(PATH, prompt="x", best_of=3, stream=True)["message"]
    assert "best_of is 1, n 2" in server.refused(PATH, prompt="x", best_of=1, n=2)["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_gets_no_chunks(server: Served, stream: bool) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    with server.connect() as connection:
        connection.sendall(head + body)
        with connection.makefile("rb") as file:
            answer, _, content = file.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer.lower() and answer.startswith(b"HTTP/1.")
    if stream:
        assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")
    else:
        assert len(json.loads(content)["choices"][0]["text"]) == 3


def test_tokens_can_be_shown_by_their_ids(server: Served) -> None:
    (choice,) = server.complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)["choices"]
    (token,) = choice["logprobs"]["tokens"]
    assert token == f"token_id:{ord(choice['text'])}"


def test_token_ids_are_given_where_they_are_wanted(server: Served) -> None:
    (choice,) = server.complete(return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [256, HELLO] and bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = [event["choices"][0] for event in server.events(PATH, prompt="hello", max_tokens=3, return_token_ids=True)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[256, HELLO], None, None]
    assert all(bytes(chunk["token_ids"]).decode() == chunk["text"] for chunk in chunks)
    (choice,) = server.complete()["choices"]
    assert choice["prompt_token_ids"] is None and choice["token_ids"] is None


def test_prompts_are_echoed_with_their_logprobs(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(spell(97)))
    body = {"prompt": [[256, 261], [98, 99]], "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    choices = server.complete(**body)["choices"]
    assert [choice["text"] for choice in choices] == ["helloaa", "helloaa", "bcaa", "bcaa"]
    first, _, third, fourth = (choice["logprobs"] for choice in choices)
    assert first["tokens"] == ["<s>", "hello", "a", "a"] and first["text_offset"] == [0, 0, 5, 6]
    assert first["token_logprobs"] == [None, -0.5, -0.5, -0.5] and first["top_logprobs"][0] is None
    assert third["tokens"] == ["b", "c", "a", "a"] and third == fourth
    events = server.events(PATH, **body)
    texts = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in range(4)]
    assert texts == [choice["text"] for choice in choices]
    tokens = [e["choices"][0]["logprobs"]["tokens"] for e in events if e["choices"][0]["index"] == 3]
    assert list(itertools.chain(*tokens)) == fourth["tokens"]


def test_a_prompt_can_be_scored_alone(server: Served) -> None:
    answer = server.complete(echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello" and choice["logprobs"]["tokens"] == ["<s>", "hello"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    (event,) = server.events(PATH, prompt="hello", echo=True, max_tokens=0, logprobs=1)
    assert event["choices"][0]["text"] == "hello" and event["choices"][0]["logprobs"] == choice["logprobs"]


def test_prompt_logprobs_are_those_of_vllm(server: Served) -> None:
    (choice,) = server.complete(prompt_logprobs=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None and second["261"] == {"logprob": -0.5, "rank": 2, "decoded_token": "hello"}
    assert second["260"]["rank"] == 1 and len(second) == 2


def test_every_field_reaches_the_engine(server: Served) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 1.0, "seed": -5,
        "presence_penalty": -1.0, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 2, "logprobs": 3, "n": 2,
        "prompt_logprobs": 4, "max_tokens": 8,
    }  # fmt: skip
    others = {"stop": "Z", "stop_token_ids": [3], "include_stop_str_in_output": True, "logit_bias": {"5": 1.5}}
    server.complete(**fields, **others, priority=-2, best_of=2)
    (request,) = server.engine.submitted
    asked = {name: getattr(request.sampling, name) for name in fields}
    assert asked == fields and request.priority == -2
    sampling = request.sampling
    assert (sampling.stop, sampling.stop_tokens, sampling.include_stop) == (("Z",), (3,), True)
    assert sampling.logit_bias == {5: 1.5}


def test_the_models_recommendations_are_the_defaults(serve: Callable[..., Served]) -> None:
    server = serve(model=checkpoint(sampling_defaults={"temperature": 0.6, "top_k": 20, "stop_tokens": (9,)}))
    server.complete()
    server.complete(temperature=1, top_k=-1, stop_token_ids=[3])
    first, second = (request.sampling for request in server.engine.submitted)
    assert (first.temperature, first.top_k, first.stop_tokens, first.max_tokens) == (0.6, 20, (9,), 4)
    assert (second.temperature, second.top_k, second.stop_tokens) == (1.0, 0, (9, 3))


def test_null_is_the_same_as_nothing(server: Served) -> None:
    nothing = dict.fromkeys(("temperature", "n", "stop", "logit_bias", "stream", "suffix", "max_tokens", "user"))
    server.complete(**nothing)
    assert server.engine.submitted[0].sampling.max_tokens == 16


def test_an_answers_id_can_be_chosen(server: Served) -> None:
    answers = [server.complete(request_id="mine") for _ in range(2)]
    assert [answer["id"] for answer in answers] == ["cmpl-mine", "cmpl-mine"]
    assert len({request.request_id for request in server.engine.submitted}) == 2, "the engine needs its own"


def test_only_the_last_tokens_of_a_prompt_are_used(server: Served) -> None:
    last = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    assert server.complete(prompt="abcd", echo=True, **last)["choices"][0]["text"].startswith("cd")
    assert server.engine.submitted[-1].prompt == (99, 100)
    server.complete(prompt=[[97, 98, 99], [98]], truncate_prompt_tokens=1)
    assert [request.prompt for request in server.engine.submitted[-2:]] == [(99,), (98,)]
    server.complete(prompt="a" * 400, truncate_prompt_tokens=-1, max_tokens=6)
    assert server.engine.submitted[-1].prompt == 250 * (97,)
    server.chat("hello", truncate_prompt_tokens=3)
    assert len(server.engine.submitted[-1].prompt) == 3
