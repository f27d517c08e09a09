import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from stack_serve.openai.app import make_app
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.openapi import openapi_document
from stack_serve.openai.service import Service

from .conftest import Served
from .fake_engine import checkpoint

DOCUMENT = openapi_document(has_keys=False)


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **DOCUMENT})


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)


def test_each_route_is_described() -> None:
    routes = make_app(Service(checkpoint(), OpenAIConfig(port=0))).routes
    served = {
        (re.sub(":path", "", route.path), method.lower()) for route in routes for method in route.methods - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_references_resolve_and_schemas_are_schemas() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    references = {each["$ref"] for each in objects(DOCUMENT) if "$ref" in each}
    assert references == {f"#/components/schemas/{name}" for name in schemas if name != "Error"} | {
        "#/components/schemas/Error"
    }
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "\n\n" not in schema.get("description", "")


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("name", "body", "is_valid"),
    [
        ("ChatBody", {"messages": MESSAGES, "temperature": None, "response_format": {"type": "text"}}, True),
        ("ChatBody", {"messages": MESSAGES, "max_tokens": 3.0, "n": 1.0}, True),
        ("ChatBody", {"messages": MESSAGES, "max_tokens": 3.5}, False),
        ("ChatBody", {"messages": [{"role": "tool", "content": "1"}]}, False),
        ("ChatBody", {"messages": []}, False),
        ("ChatBody", {"messages": MESSAGES, "temperature": -1}, False),
        ("ChatBody", {"messages": MESSAGES, "tool_choice": "never"}, False),
        ("ChatBody", {"messages": MESSAGES, "temprature": 1}, False),
        ("CompletionBody", {"prompt": [[1, 2], [3]], "top_p": 0.5, "stop": ["a"]}, True),
        ("CompletionBody", {"prompt": "a", "top_p": 0.0}, False),
        ("CompletionBody", {"prompt": "a", "truncate_prompt_tokens": 0}, False),
        ("ResponsesBody", {"input": MESSAGES}, True),
        ("ResponsesBody", {"input": 3}, False),
        ("MessagesBody", {"model": "m", "messages": MESSAGES, "max_tokens": 3}, True),
        ("MessagesBody", {"model": None, "messages": MESSAGES, "max_tokens": 3}, False),
        ("RerankBody", {"query": "a", "documents": ["a", {"text": "b"}]}, True),
        ("RerankBody", {"query": "a", "documents": [3]}, False),
        ("RerankBody", {"query": "a", "documents": [{"text": "b", "title": "c"}]}, False),
    ],
)
def test_schemas_describe_what_the_server_takes(
    server: Served, name: str, body: dict[str, Any], is_valid: bool
) -> None:
    (path,) = (
        path
        for path, methods in DOCUMENT["paths"].items()
        if path.startswith("/v1") and name in str(methods.get("post", {}).get("requestBody"))
    )
    assert validator(name).is_valid(body) == is_valid
    assert (server.post(path, **body).status_code != 400) == is_valid


def test_the_document_is_served_without_a_key_and_names_the_keys(server: Served) -> None:
    assert server.client.get("/openapi.json").json() == DOCUMENT
    with_keys = openapi_document(has_keys=True)
    assert with_keys["security"] == [{"bearer": []}] and "security" not in DOCUMENT
    assert with_keys["paths"]["/health"]["get"]["security"] == []
    assert "security" not in with_keys["paths"]["/v1/completions"]["post"]
