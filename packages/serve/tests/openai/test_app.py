from importlib.metadata import version

import pytest

from .conftest import Served


def test_models(server: Served) -> None:
    listed = server.client.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list" and card == server.client.get("/v1/models/tiny").json()
    assert (card["id"], card["object"], card["max_model_len"], card["root"]) == ("tiny", "model", 256, "tiny")


def test_health_and_version(server: Served) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").json() == {"status": "ready", "model": "tiny"}
    assert server.client.get("/version").json() == {"version": version("stack-serve")}


def test_tokenize(server: Served) -> None:
    answer = server.post("/tokenize", prompt="hello a", return_token_strs=True).json()
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [256, 261, 32, 97],
        "token_strs": ["<s>", "hello", " ", "a"],
    }
    answer = server.post("/tokenize", prompt="hello a", add_special_tokens=False).json()
    assert answer["tokens"] == [261, 32, 97] and answer["token_strs"] is None


def test_tokenize_messages(server: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert server.post("/tokenize", messages=messages).json()["tokens"] == [256, 258, 261, 257, 259]
    fields = {"add_generation_prompt": False, "add_special_tokens": True, "return_token_strs": True}
    answer = server.post("/tokenize", messages=messages, **fields).json()
    assert answer["tokens"] == [256, 256, 258, 261, 257]
    assert answer["token_strs"] == ["<s>", "<s>", "<|user|>", "hello", "</s>"]


def test_detokenize(server: Served) -> None:
    assert server.post("/detokenize", tokens=[256, 261, 262]).json() == {"prompt": "hello world"}
    assert server.refused("/detokenize", tokens=[265])["param"] == "tokens"
    assert server.refused("/detokenize", tokens="x")["param"] == "tokens"
    assert server.refused("/tokenize", status=404, prompt="x", model="gpt-4")["code"] == "model_not_found"


def test_each_request_has_an_id_that_the_log_tells(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="stack_serve.access"):
        answer = server.post("/v1/completions", prompt="x", max_tokens=1)
        given = server.client.get("/health", headers={"x-request-id": "mine-1"})
        odd = server.client.get("/no%0Athing", headers={"x-request-id": "a b"})
        server.wait_until(lambda: len(caplog.messages) == 3)
    made = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{made}" and given.headers["x-request-id"] == "mine-1"
    first, second, third = caplog.messages
    assert first.startswith("127.0.0.1 POST /v1/completions 200 0.") and first.endswith(made)
    assert second.startswith("127.0.0.1 GET /health 200") and second.endswith(" mine-1")
    assert third.startswith("127.0.0.1 GET /no\\nthing 404") and odd.headers["x-request-id"] != "a b"
