"""Other forms of messages with tool calls, for chat templates that do not read the usual one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["one_call_each", "other_forms"]


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Spreads messages with several tool calls over messages with one call, each followed by its results.

    A result belongs to the call with its `tool_call_id`; without ids, results have the order of the calls.
    """
    spread = list[Mapping[str, Any]]()
    turn = list[Mapping[str, Any]]()  # messages of the latest turn that was spread
    unanswered = list[Mapping[str, Any]]()
    for message in messages:
        calls = message.get("tool_calls")
        if unanswered and message.get("role") == "tool":
            name = message.get("tool_call_id")
            call = next((each for each in turn if name and name == each["tool_calls"][0].get("id")), unanswered[0])
            unanswered = [each for each in unanswered if each is not call]
            spread.insert(_place(spread, call), message)
            continue
        turn, unanswered = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        if isinstance(calls, list) and len(calls) > 1 and all(isinstance(call, Mapping) for call in calls):
            rest = {"role": message.get("role"), "content": ""}
            turn = [_with_call(message if call is calls[0] else rest, call) for call in calls]
            unanswered = list(turn)
            spread += turn
        else:
            spread.append(message)
    return spread


def _with_call(message: Mapping[str, Any], call: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "tool_calls": [call]}


def _place(spread: Sequence[Mapping[str, Any]], call: Mapping[str, Any]) -> int:
    """Returns the place behind a call, and behind earlier results of it."""
    place = next(place for place, each in enumerate(spread) if each is call) + 1
    while place < len(spread) and spread[place].get("role") == "tool":
        place += 1
    return place


def other_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yields forms to try if a template fails: arguments as JSON text, "" for no content, or no reasoning at a call."""
    if not any(message.get("tool_calls") for message in messages):
        return
    with_content = [{**message, "content": ""} if message.get("content") is None else message for message in messages]
    yield list(map(_with_text_arguments, messages))
    yield with_content
    yield list(map(_with_text_arguments, with_content))
    if any("thinking" in message for message in messages):
        yield [{key: value for key, value in message.items() if key != "thinking"} for message in with_content]


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
