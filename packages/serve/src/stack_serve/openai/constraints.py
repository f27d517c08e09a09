"""Constraints of requests: the fields that restrict the text of an answer, in OpenAI's and vLLM's interfaces."""

from typing import Any

import pydantic

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import Constraint
from stack_serve.openai.bodies import explain
from stack_serve.openai.errors import as_api_error, bad_request
from stack_serve.openai.schemas import GenerationBody, ResponseFormat, StructuredOutputs

__all__ = ["constraint_and_field"]

_ANY_OBJECT = {"type": "object"}
_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def constraint_and_field(body: GenerationBody) -> tuple[Constraint | None, str | None]:
    """Returns the constraint of a request and the field that describes it, or (None, None).

    Raises:
      ApiError: a field is invalid or incomplete, or two fields describe a constraint. The error names the field.
    """
    given = {name: _languages(name, getattr(body, name)) for name in _FIELDS if getattr(body, name) is not None}
    given = {name: languages for name, languages in given.items() if languages}
    whitespace = body.guided_whitespace_pattern
    if whitespace is not None and "guided_json" not in given:
        raise bad_request(
            "guided_whitespace_pattern needs guided_json beside it. Leave it out.", param="guided_whitespace_pattern"
        )
    if not given:
        return None, None
    if len(given) > 1:
        raise bad_request(
            f"{' and '.join(given)} both constrain the answer; give one of them.", param=next(reversed(given))
        )
    ((field, languages),) = given.items()
    if whitespace is not None:
        languages |= {"whitespace": whitespace}
    try:
        return Constraint(**languages), field
    except pydantic.ValidationError as error:
        inner = dict.fromkeys(("json_schema", "regex", "choice", "grammar", "whitespace"), field)
        raise explain(error, inner) from None
    except GenerationError as error:
        raise as_api_error(error, {"constraint": field}) from None


def _languages(name: str, value: Any) -> dict[str, Any]:
    """Returns the fields of `Constraint` that a field of the body sets; empty if it does not constrain the text."""
    if isinstance(value, ResponseFormat):
        return _response_format(value)
    if isinstance(value, StructuredOutputs):
        return _structured_outputs(value)
    kind = name.removeprefix("guided_")
    return {"json_schema" if kind == "json" else kind: value}


def _response_format(value: ResponseFormat) -> dict[str, Any]:
    if value.json_schema is not None and value.type != "json_schema":
        raise bad_request(
            f"response_format has a json_schema, and the type {value.type!r}; expected 'json_schema'.",
            param="response_format",
        )
    if value.type == "text":
        return {}
    if value.type == "json_object":
        return {"json_schema": _ANY_OBJECT}
    if value.json_schema is None or value.json_schema.schema_ is None:
        raise bad_request(
            "response_format has the type 'json_schema', but json_schema.schema is missing; it has no default.",
            param="response_format",
        )
    return {"json_schema": value.json_schema.schema_}


def _structured_outputs(value: StructuredOutputs) -> dict[str, Any]:
    languages: dict[str, Any] = {
        "json_schema": value.json_,
        "regex": value.regex,
        "choice": value.choice,
        "grammar": value.grammar,
    }
    given = {name: language for name, language in languages.items() if language is not None}
    if value.json_object:
        if "json_schema" in given:
            raise bad_request("structured_outputs has json and json_object; give one.", param="structured_outputs")
        given["json_schema"] = _ANY_OBJECT
    if not given:
        raise bad_request(
            "structured_outputs has none of json, regex, choice, grammar and json_object; give one.",
            param="structured_outputs",
        )
    if value.disable_any_whitespace and value.whitespace_pattern is not None:
        raise bad_request(
            "structured_outputs has disable_any_whitespace and whitespace_pattern; give one.",
            param="structured_outputs",
        )
    whitespace = "" if value.disable_any_whitespace else value.whitespace_pattern
    return given if whitespace is None else {**given, "whitespace": whitespace}
