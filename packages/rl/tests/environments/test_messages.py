"""Conversations over tokens: what was drawn stays as it was, and templates that tell it otherwise are seen."""

import asyncio
import json

import pytest

from stack_core.abi.errors import ConfigError, DataError, EnvironmentFailed
from stack_core.text.parsers.hermes import HermesParser
from stack_rl.contracts import EnvironmentKind, Tasks
from stack_rl.environments.tools import ToolsConfig, _parser_of
from stack_rl.episodes import Attempt, Player

from ..scripted import END, Letters, Policy, ScriptedEngine

TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\x00\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


class Spelled(Letters):
    """Letters that spell their end token too, as a template writes it."""

    def decode(self, ids):
        return "".join(chr(index) for index in ids if index > 1)

    def token_bytes(self, token):
        return chr(token).encode()


def add(first: int, second: int = 1) -> int:
    """Adds numbers."""
    return first + second


async def slow(x: int) -> int:
    await asyncio.sleep(30)
    return x


def policy(template=TEMPLATE):
    return Policy(tokenizer=Spelled(), chat_template=template)


def play(tmp_path, answers, *, template=TEMPLATE, on_failure="stop", **fields):
    """The episode of a policy that answers in turn."""
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5"}))
    config = ToolsConfig(
        source=str(records),
        rewards=("exact",),
        **{"tools": (add, slow), "max_tokens": 120, "isolation": "thread", **fields},
    )
    assert isinstance(config, EnvironmentKind)
    config.check(None)
    tasks = config.build(policy(template), seq_tokens=600, seed=0)
    assert isinstance(tasks, Tasks)
    turns = iter(answers)
    engine = ScriptedEngine(lambda prompt: (*map(ord, next(turns)), END))
    (found,) = Player(tasks, engine, seq_tokens=600, on_failure=on_failure).play(
        [Attempt(0, 0)], seed=(0,), greedy=False
    )
    return tasks, found


CALL = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'


def test_a_policy_calls_a_tool_and_answers_and_the_text_is_the_template_s(tmp_path):
    tasks, found = play(tmp_path, [CALL, "5"])
    text = tasks.text(tuple(found.tokens.tolist()))
    assert text == (
        f"tools:add;slow;<user>2+3?\x00\n<assistant>{CALL}\x00\n<tool>5\x00\n<assistant>5\x00"
    )  # as the template writes the whole conversation
    drawn = tasks.text(tuple(found.tokens[found.sampled].tolist()))
    assert drawn == f"{CALL}\x005\x00"
    assert found.rewards.sum() == 1.0 and found.verdict == "correct"
    assert found.facts == {"exact": 1.0, "calls": 1.0, "tool_timeouts": 0.0, "turns": 2.0, "prefix_breaks": 0.0}


def test_what_is_wrong_with_a_call_is_told_to_the_policy(tmp_path):
    calls = ['<tool_call>{"name": "sub"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', "5"]
    tasks, found = play(tmp_path, calls)
    text = tasks.text(tuple(found.tokens.tolist()))
    assert "Error: no such call (KeyError: 'sub'); tools: add, slow." in text
    assert "Error: TypeError: add() missing" in text and found.rewards.sum() == 1.0


def test_a_malformed_call_is_told_to_the_policy_beside_the_results_of_others(tmp_path):
    malformed = '<tool_call>{"name": "add", "arguments": 3}</tool_call>'
    tasks, found = play(tmp_path, [malformed, f"{CALL}{malformed}", "5"], max_tokens=200)
    text = tasks.text(tuple(found.tokens.tolist()))
    error = "<tool>Error: a call is malformed; tools: add, slow.\x00\n"
    assert f"<assistant>{malformed}\x00\n{error}" in text and f"<tool>5\x00\n{error}<assistant>5" in text
    assert found.facts["calls"] == 3.0 and found.verdict == "correct"


XML = "<tool_call>\n<function=add>\n<parameter=first>\n2\n</parameter>\n</function>\n</tool_call>"


def test_the_template_decides_the_format_of_calls(tmp_path):
    tasks, found = play(tmp_path, [XML, "5"], template=TEMPLATE + f"{{# {XML} #}}")
    assert "<tool>3\x00\n" in tasks.text(tuple(found.tokens.tolist())) and found.facts["calls"] == 1.0
    _, found = play(tmp_path, [XML, "5"], template=TEMPLATE)
    assert found.facts["calls"] == 1.0, "a malformed call of the usual format"
    marked = TEMPLATE + "{# [TOOL_CALLS] #}"
    _, found = play(tmp_path, ['[TOOL_CALLS]add[ARGS]{"first": 4}', "5"], template=marked)
    assert found.facts["calls"] == 1.0 and found.verdict == "correct"

    class Special(Spelled):
        def decode(self, ids):
            return super().decode(ids).replace("[TOOL_CALLS]", "")

    special = Policy(tokenizer=Special(), chat_template=marked)
    assert _parser_of(special) is HermesParser, "markers that are special tokens are not in the text"


def test_turns_are_bounded_and_a_message_that_was_cut_off_calls_nothing(tmp_path):
    _, found = play(tmp_path, [CALL, CALL, CALL], max_turns=2)
    assert found.facts["turns"] == 2.0 and found.rewards.sum() == 0.0 and found.verdict is None
    _, found = play(tmp_path, [CALL], max_tokens=20)
    assert found.sampled.sum() == 20 and found.verdict == "wrong"


THOUGHT = f"<think>hm</think>{CALL}"


def test_a_template_that_forgets_thoughts_is_a_failure_or_counted(tmp_path):
    with pytest.raises(EnvironmentFailed, match=r"(?s)rewrites earlier turns.*hink>hm.*became 'ool_call>"):
        play(tmp_path, [THOUGHT, "5"], template=FORGETFUL)
    tasks, found = play(tmp_path, [THOUGHT, "5"], template=FORGETFUL, history="as_seen")
    text = tasks.text(tuple(found.tokens.tolist()))
    assert f"<assistant>{THOUGHT}\x00\n<tool>5\x00\n<assistant>5\x00" in text
    assert found.facts["prefix_breaks"] == 1.0 and found.rewards.sum() == 1.0


def test_tools_need_a_place_in_the_template(tmp_path):
    with pytest.raises(DataError, match="has no place for tools"):
        play(tmp_path, ["5"], template="{% for message in messages %}{{ message.content }}{% endfor %}")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (("no_such_module:f",), "cannot be imported"),
        (("json:nothing",), "cannot be imported"),
        (("json",), "expected 'module:function'"),
        ((add, "operator:add"), "Two tools are called 'add'"),
    ],
)
def test_tools_that_do_not_fit_are_refused(tmp_path, tools, message):
    with pytest.raises(ConfigError, match=message):
        play(tmp_path, ["5"], tools=tools)
