import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stack_serve.openai.bodies import _FOREIGN
from stack_serve.openai.schemas import ChatBody, CompletionBody

from .conftest import Served
from .fake_engine import FakeEngine, checkpoint

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
USUAL: dict[str, dict[str, Any]] = {COMPLETE: {"prompt": "hello", "max_tokens": 2}, CHAT: {"messages": MESSAGES}}


def test_an_error_has_openais_shape(server: Served) -> None:
    error = server.refused(COMPLETE, prompt="x", temperature=-1)
    assert error == {
        "message": "temperature: Input should be greater than or equal to 0 (given -1.0).",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**9),
        ("n", 1.5),
        ("best_of", 0),
        ("best_of", 129),
        ("skip_special_tokens", "no"),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", [1]),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", "high"),
        ("request_id", ""),
        ("user", 3),
        ("vllm_xargs", "top_sigma"),
        ("vllm_xargs", ["top_sigma"]),
        ("prompt_logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_impossible_values_are_refused_by_name(server: Served, field: str, value: Any) -> None:
    error = server.refused(COMPLETE, **{**USUAL[COMPLETE], field: value})
    assert error["param"].split(".")[0] == field and field in error["message"]
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    ("stop", "param", "problem"),
    [
        ([""], "stop.0", "stop.0 is empty: every text would stop there"),
        ("", "stop", "stop is empty"),
        (["a", "x" * 257], "stop.1", "stop.1 has 257 characters; the most is 256"),
        (["a"] * 400_000, "stop", "stop has 400000 texts; the most is 16"),
        ({"a": 1}, "stop", "neither a text nor a list of texts"),
    ],
)
def test_stop_texts_are_checked_one_by_one(server: Served, stop: Any, param: str, problem: str) -> None:
    error = server.refused(COMPLETE, **USUAL[COMPLETE], stop=stop)
    assert error["param"] == param and problem in error["message"]
    assert server.post(COMPLETE, **USUAL[COMPLETE], stop=["x" * 256] * 16).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value", "advice"),
    [
        (COMPLETE, "tools", [{"type": "function"}], "Use tools of /v1/chat/completions"),
        (CHAT, "functions", [{"name": "f"}], "Use tools"),
        (CHAT, "audio", {"voice": "x"}, "reads and writes text"),
        (CHAT, "modalities", ["text", "audio"], "reads and writes text"),
        (CHAT, "store", True, "Nothing is stored"),
        (CHAT, "chat_template", "{{ 1 }}", "--chat-template FILE"),
        (CHAT, "echo", True, "/v1/completions"),
        (COMPLETE, "suffix", "end", "Put the text that follows into the prompt"),
        (COMPLETE, "use_beam_search", True, "n continuations"),
        (COMPLETE, "guided_decoding_backend", "outlines", "llguidance compiles"),
        (COMPLETE, "temprature", 1, "Did you mean 'temperature'"),
        (COMPLETE, "x" * 5000, 1, "Unrecognized request argument"),
    ],
)
def test_what_is_not_served_is_refused_with_advice(
    server: Served, path: str, field: str, value: Any, advice: str
) -> None:
    error = server.refused(path, **{**USUAL[path], field: value})
    assert error["code"] == "unknown_parameter" and error["param"] == field[:100]
    assert advice in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}),
        (CHAT, {"store": False, "service_tier": "auto", "parallel_tool_calls": True, "reasoning_effort": None}),
        (CHAT, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}),
        (COMPLETE, {"suffix": "", "best_of": 1, "length_penalty": 1.0}),
        (COMPLETE, {"use_beam_search": False, "bad_words": [], "spaces_between_special_tokens": True}),
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(server: Served, path: str, fields: dict[str, Any]) -> None:
    answer = server.post(path, **{**USUAL[path], "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text


def test_a_bool_is_no_number(server: Served) -> None:
    for field, value in (("length_penalty", True), ("use_beam_search", 0)):
        assert server.refused(COMPLETE, **USUAL[COMPLETE], **{field: value})["param"] == field


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON in UTF-8"),
        (b"{", "not JSON in UTF-8"),
        (b'{"prompt": "\xff"}', "not JSON in UTF-8"),
        (b'{"prompt": "x", "temperature": NaN}', "not JSON in UTF-8"),
        (b'{"prompt": "x", "temperature": 1e999}', ""),
        (b'{"prompt": "\\ud800"}', ""),
        (b"[1]", "a list; a JSON object was expected"),
        (b'"x"', "a text; a JSON object"),
        (b"null", "null; a JSON object"),
        (b"1", "a number; a JSON object"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 64 levels"),
        (b"[" * 100_000, "not JSON"),
        (b'{"metadata": ' * 100_000 + b"1" + b"}" * 100_000, "not JSON"),
        (b"{}", "prompt is missing"),
    ],
)
def test_bodies_that_are_no_requests(server: Served, body: bytes, message: str) -> None:
    answer = server.client.post(COMPLETE, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_brackets_in_a_text_are_not_nesting(server: Served) -> None:
    answer = server.complete(prompt="[{" * 90, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"].startswith("[{" * 90)


@pytest.mark.parametrize(
    "prompt", [{"a": 1}, 3, 1.5, True, [], [[]], [1.5], [True], ["a", 1], ["a", [1]], [[1], "a"], [["a"]], [[1, "a"]]]
)
def test_prompts_of_another_form(server: Served, prompt: Any) -> None:
    assert server.refused(COMPLETE, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 265, 2**31, 2**63])
def test_tokens_that_the_model_lacks(server: Served, token: int) -> None:
    error = server.refused(COMPLETE, prompt=[1, token])
    assert error["param"] == "prompt" and str(token) in error["message"] and "265" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {"prompt": "a" * 300}, "prompt"),
        (COMPLETE, {"prompt": [1] * 256}, "prompt"),
        (COMPLETE, {"prompt": "a" * 100, "max_tokens": 200}, "max_tokens"),
        (COMPLETE, {"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 10**9}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 10**9}, "max_completion_tokens"),
    ],
)
def test_what_does_not_fit_the_context(server: Served, path: str, body: dict[str, Any], param: str) -> None:
    error = server.refused(path, **body)
    assert error["code"] == "context_length_exceeded" and error["param"] == param
    assert "maximum context length is 256 tokens" in error["message"]


def test_an_empty_prompt_is_refused(server: Served) -> None:
    assert "no tokens" in server.refused(COMPLETE, prompt="", add_special_tokens=False)["message"]


def test_the_engines_limits_are_told_in_the_clients_words(server: Served) -> None:
    assert server.refused(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    assert server.refused(COMPLETE, prompt="x", stop_token_ids=[300])["param"] == "stop_token_ids"


def test_combinations_that_make_no_sense(server: Served) -> None:
    assert server.refused(CHAT, messages=MESSAGES, top_logprobs=2)["param"] == "top_logprobs"
    assert server.refused(COMPLETE, prompt="x", max_tokens=0)["param"] == "max_tokens"
    assert server.refused(COMPLETE, prompt="x", stream=True, prompt_logprobs=1)["param"] == "prompt_logprobs"


def test_unknown_models_and_routes(server: Served) -> None:
    error = server.refused(COMPLETE, status=404, model="gpt-4", prompt="x")
    assert error["code"] == "model_not_found" and error["param"] == "model" and "'tiny'" in error["message"]
    answer = server.client.get("/v1/models/gpt-4")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    answer = server.client.get("/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["message"] == "There is no GET /v1/nothing."
    answer = server.client.get(COMPLETE)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_only_json_is_taken(server: Served, kind: str) -> None:
    answer = server.client.post(COMPLETE, content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert server.client.post(COMPLETE, content=b"x", headers=headers).status_code == 415


def test_too_many_prompts(serve: Callable[..., Served]) -> None:
    server = serve(max_choices=4)
    server.complete(prompt=["a", "b"], n=2)
    error = server.refused(COMPLETE, prompt=["a", "b", "c"], n=2)
    assert error["param"] == "prompt" and "takes 2" in error["message"]


def test_one_continuation_that_fails_is_a_500_of_its_own(serve: Callable[..., Served]) -> None:
    def script(request: Any, index: int) -> Any:
        yield 97
        if request.prompt[-1] == ord("!"):
            raise ArithmeticError("The logits are not finite.")
        yield from b"bcdef"

    server = serve(FakeEngine(script))
    error = server.refused(COMPLETE, status=500, prompt="x!", max_tokens=3)
    assert error["message"] == "The logits are not finite." and error["type"] == "server_error"
    answer = server.post(COMPLETE, prompt="x!", max_tokens=3, stream=True)
    first, failure, done, _ = answer.text.split("\n\n")
    assert json.loads(first[6:])["choices"][0]["text"] == "a" and done == "data: [DONE]"
    assert json.loads(failure[6:])["error"]["code"] == "internal_error"
    assert server.complete(prompt="x", max_tokens=3)["choices"][0]["text"] == "abc"


def test_a_fault_of_the_server_is_a_500_of_one_request(serve: Callable[..., Served], caplog: Any) -> None:
    class Broken(type(checkpoint().tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **options: bool) -> list[int]:
            if "!" in text:
                raise RuntimeError("no such thing")
            return super().encode(text, **options)

    server = serve(model=checkpoint(tokenizer=Broken()))
    error = server.refused(COMPLETE, status=500, prompt="x!")
    assert "no such thing" not in error["message"] and "no such thing" in caplog.text
    server.complete()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *_FOREIGN})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETE, CHAT, "/tokenize", "/detokenize"]),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=4),
)
def test_no_field_makes_the_server_fail(server: Served, path: str, fields: dict[str, Any]) -> None:
    usual = USUAL.get(path, {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]})
    body = json.dumps({**usual, "max_tokens": 1, **fields} if path in USUAL else {**usual, **fields})
    answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.text) < 2000


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([COMPLETE, CHAT, "/tokenize", "/detokenize"]), body=st.binary(max_size=60))
def test_no_bytes_make_the_server_fail(server: Served, path: str, body: bytes) -> None:
    answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
