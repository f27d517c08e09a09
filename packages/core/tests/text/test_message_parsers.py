"""Every parser: equal results for every split, nothing lost, and what each format writes is read back."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core.abi.errors import ConfigError, PluginError, UnknownName
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.text.message_parsers import (
    MessageDelta,
    MessageParser,
    ParserChain,
    ToolCall,
    choose_parser,
    merge_deltas,
    parse_calls,
)
from stack_core.text.parsers.deepseek import DeepSeekV3Parser, DeepSeekV32Parser
from stack_core.text.parsers.harmony import HarmonyParser, HarmonyReasoningParser
from stack_core.text.parsers.hermes import HermesParser
from stack_core.text.parsers.json_scanner import JsonScanner
from stack_core.text.parsers.llama3 import Llama3Parser
from stack_core.text.parsers.mistral import MistralParser, MistralReasoningParser
from stack_core.text.parsers.pythonic import PythonicParser
from stack_core.text.parsers.qwen3_coder import Qwen3CoderParser
from stack_core.text.parsers.think import ThinkParser

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "either": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "find.all-2")]
Calls = list[tuple[str, dict[str, Any]]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_hermes(calls: Calls) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumped(a)}}}\n</tool_call>' for n, a in calls)


def write_llama3(calls: Calls) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {dumped(a)}}}' for n, a in calls)


def write_python_tag(calls: Calls) -> str:
    return "<|python_tag|>" + write_llama3(calls)


def write_mistral_array(calls: Calls) -> str:
    return f"[TOOL_CALLS] {dumped([{'name': n, 'arguments': a} for n, a in calls])}"


def write_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls)


def write_mistral_ids(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]Ab1Ab1Ab1[ARGS]{dumped(a)}" for n, a in calls)


def deepseek(words: str) -> str:
    return f"<\N{FULLWIDTH VERTICAL LINE}{words.replace(' ', chr(0x2581))}\N{FULLWIDTH VERTICAL LINE}>"


def write_deepseek_v3(calls: Calls) -> str:
    begin, between, end = (deepseek(f"tool {each}") for each in ("call begin", "sep", "call end"))
    each = "\n".join(f"{begin}function{between}{n}\n```json\n{dumped(a)}\n```{end}" for n, a in calls)
    return f"{deepseek('tool calls begin')}{each}{deepseek('tool calls end')}"


def write_deepseek_v31(calls: Calls) -> str:
    begin, between, end = (deepseek(f"tool {each}") for each in ("call begin", "sep", "call end"))
    each = "".join(f"{begin}{n}{between}{dumped(a)}{end}" for n, a in calls)
    return f"{deepseek('tool calls begin')}{each}{deepseek('tool calls end')}"


BAR = "\N{FULLWIDTH VERTICAL LINE}"


def write_deepseek_v32(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text, written = isinstance(value, str), value if isinstance(value, str) else dumped(value)
        name = f'<{BAR}DSML{BAR}parameter name="{key}" string="{str(is_text).lower()}">'
        return f"{name}{written}</{BAR}DSML{BAR}parameter>\n"

    invokes = "\n".join(
        f'<{BAR}DSML{BAR}invoke name="{n}">\n{"".join(itertools.starmap(parameter, a.items()))}</{BAR}DSML{BAR}invoke>'
        for n, a in calls
    )
    return f"<{BAR}DSML{BAR}function_calls>\n{invokes}\n</{BAR}DSML{BAR}function_calls>"


def write_qwen3_coder(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else dumped(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={n}>\n{''.join(itertools.starmap(parameter, a.items()))}</function>\n</tool_call>"
        for n, a in calls
    )


def write_pythonic(calls: Calls) -> str:
    each = ", ".join(f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls)
    return f"<|python_start|>[{each}]<|python_end|>"


def write_harmony(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>"
        for n, a in calls
    )


def write_harmony_role(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{n}<|channel|>commentary json<|message|>{dumped(a)}<|call|>" for n, a in calls
    )


WRITERS: list[tuple[type[MessageParser], Callable[[Calls], str]]] = [
    (HermesParser, write_hermes),
    (Llama3Parser, write_python_tag),
    (MistralParser, write_mistral_array),
    (MistralParser, write_mistral),
    (MistralParser, write_mistral_ids),
    (DeepSeekV3Parser, write_deepseek_v3),
    (DeepSeekV3Parser, write_deepseek_v31),
    (DeepSeekV32Parser, write_deepseek_v32),
    (Qwen3CoderParser, write_qwen3_coder),
    (PythonicParser, write_pythonic),
    (HarmonyParser, write_harmony),
    (HarmonyParser, write_harmony_role),
]
TOOL_PARSERS = list(dict.fromkeys(parser for parser, _ in WRITERS))
REASONING_PARSERS: list[type[MessageParser]] = [ThinkParser, MistralReasoningParser, HarmonyReasoningParser]
PIECES = sorted(
    {
        *itertools.chain(*(parser.markers for parser in (*TOOL_PARSERS, *REASONING_PARSERS))),
        *(write([("add", {"text": "x", "count": 1})]) for _, write in WRITERS),
        '{"name": "add", "arguments": {"text": "a\\u00e9\\n"}}',
        '{"arguments": "{\\"text\\": 1}", "name": "add"}',
        '{"name": "add", "parameters": null}',
        *(f'<{BAR}DSML{BAR}invoke name="add">', f'<{BAR}DSML{BAR}parameter name="a" string="', 'true">', 'false">'),
        *(f"</{BAR}DSML{BAR}parameter>", f"</{BAR}DSML{BAR}invoke>"),
        *("<function=add>", "<parameter=text>", "</parameter>", "</function>", " to=functions.add", "analysis"),
        *('{"name": ', '"add"', ', "arguments": ', "{", "}", "[", "]", ",", ":", ";", '"', "```json", "true", "-1.5e3"),
        *(" ", "\n", "é", "answer"),
    }
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(alphabet=" \n<>[]{}|\"':,ax1", max_size=20)
FIELDS = {
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    "count": st.integers(-(10**6), 10**6),
    "ratio": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "flag": st.booleans(),
    "items": st.lists(st.integers() | st.text('a]}"\\é', max_size=3), max_size=3),
    "either": st.none() | st.dictionaries(st.text("k}", max_size=2), st.booleans(), max_size=2),
}
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "find.all-2"]), st.fixed_dictionaries({}, optional=FIELDS)),
    min_size=1,
    max_size=3,
)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def parts(deltas: list[MessageDelta]) -> dict[Any, str]:
    """The text of each part of a message, by its kind, and the number and name of a call."""
    found: dict[Any, str] = {}
    names: dict[int, str] = {}
    for delta in deltas:
        if delta.name is not None:
            assert delta.call == len(names), "calls are numbered in order"
            names[delta.call] = delta.name
        key = delta.kind if delta.kind != "call" else (delta.call, names[delta.call])
        found[key] = found.get(key, "") + delta.text
    return {key: text for key, text in found.items() if text or isinstance(key, tuple)}


def run(parser: Any, pieces: list[str]) -> list[MessageDelta]:
    return [*itertools.chain(*map(parser.feed, pieces)), *parser.finish()]


def arguments_of(deltas: list[MessageDelta]) -> list[tuple[str, Any]]:
    return [(key[1], json.loads(text)) for key, text in parts(deltas).items() if isinstance(key, tuple)]


@pytest.mark.parametrize("parser", [*TOOL_PARSERS, *REASONING_PARSERS])
@settings(max_examples=20)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_deltas_are_the_same_for_every_split(parser: type[MessageParser], text: str, cuts: list[int]) -> None:
    whole = parts(run(parser(tools=TOOLS), [text]))
    assert parts(run(parser(tools=TOOLS), split(text, cuts))) == whole
    assert parts(run(parser(tools=TOOLS), list(text))) == whole


@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
@pytest.mark.parametrize("tools", TOOL_PARSERS)
@settings(max_examples=10)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_chains_are_the_same_for_every_split(
    reasoning: type[MessageParser], tools: type[MessageParser], text: str, cuts: list[int]
) -> None:
    def chain() -> ParserChain:
        return ParserChain(reasoning(), tools(tools=TOOLS))

    assert parts(run(chain(), split(text, cuts))) == parts(run(chain(), [text]))


@pytest.mark.parametrize("parser", [each for each in TOOL_PARSERS if each is not HarmonyParser])
@settings(max_examples=40)
@given(text=TEXTS)
def test_a_text_without_calls_is_content_as_it_is(parser: type[MessageParser], text: str) -> None:
    content, calls = parse_calls(parser(tools=TOOLS), text)
    assert calls or content == text
    letters = iter(text)
    assert all(letter in letters for letter in content), "content is a part of the text, in its order"


@settings(max_examples=30)
@given(text=TEXTS)
def test_streamed_arguments_begin_some_json(text: str) -> None:
    for parser in TOOL_PARSERS:
        for call in parse_calls(parser(tools=TOOLS), text)[1]:
            scanner = JsonScanner()
            assert "invalid" not in list(map(scanner.push, call.arguments)), (parser, call)


@pytest.mark.parametrize(("parser", "write"), WRITERS)
@settings(max_examples=15)
@given(calls=CALLS, content=st.sampled_from(["", "Let me see.", "é {x}"]), cuts=st.lists(st.integers(0, 1000)))
def test_written_calls_are_read_back(
    parser: type[MessageParser], write: Callable[[Calls], str], calls: Calls, content: str, cuts: list[int]
) -> None:
    if parser in (
        Qwen3CoderParser,
        DeepSeekV32Parser,
    ):  # their values are plain text, which cannot hold the closing tag
        calls = [(n, {k: v for k, v in a.items() if not isinstance(v, str) or "<" not in v}) for n, a in calls]
    text = f"{content}\n{write(calls)}\n" if content else write(calls)
    deltas = run(parser(tools=TOOLS), split(text, cuts))
    assert arguments_of(deltas) == calls
    assert parts(deltas).get("content", "") == content


@pytest.mark.parametrize(("parser", "write"), WRITERS)
def test_arguments_are_streamed(parser: type[MessageParser], write: Callable[[Calls], str]) -> None:
    text = write([("add", {"text": "long " * 20})])
    parsing = parser(tools=TOOLS)
    shown = "".join(delta.text for delta in parsing.feed(text[: text.index("long") + 40]) if delta.kind == "call")
    assert shown.count("long") >= 6


MALFORMED = [
    (HermesParser, '<tool_call>{"name": "add"'),
    (HermesParser, 'a <tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "add", "arguments": [1]}</tool_call> b'),
    (HermesParser, "<tool_call>add(1)</tool_call>"),
    (HermesParser, '<tool_call>{"arguments": {"a": tru}, "name": "add"}</tool_call>'),
    (HermesParser, "text <tool_cal"),
    (Llama3Parser, '{"name": "unknown", "parameters": {}}'),
    (Llama3Parser, '{"name": "add"}'),
    (Llama3Parser, '{"city": "Paris", "name": "add", "parameters": {}}'),
    (Llama3Parser, "<|python_tag|>print(1)"),
    (MistralParser, "[TOOL_CALLS]add"),
    (MistralParser, "[TOOL_CALLS][]"),
    (MistralParser, "[TOOL_CALLS]add[ARGS]3"),
    (DeepSeekV3Parser, f"{deepseek('tool calls begin')}text"),
    (DeepSeekV3Parser, f"{deepseek('tool call begin')}function{deepseek('tool sep')}add\n```json\n3"),
    (DeepSeekV32Parser, f"<{BAR}DSML{BAR}function_calls>\ntext"),
    (DeepSeekV32Parser, f'<{BAR}DSML{BAR}invoke name="add">\ntext'),
    (DeepSeekV32Parser, f'<{BAR}DSML{BAR}invoke name="add">\n<{BAR}DSML{BAR}parameter name="a">'),
    (Qwen3CoderParser, "<tool_call>\n<function=add>\ntext"),
    (Qwen3CoderParser, "<tool_call>text</tool_call>"),
    (Qwen3CoderParser, "<function=a b></function>"),
    (PythonicParser, "[unknown(a=1)]"),
    (PythonicParser, "[add(1)]"),
    (PythonicParser, '["add"]'),
    (PythonicParser, "<|python_start|>print(1)<|python_end|>"),
]


@pytest.mark.parametrize(("parser", "text"), MALFORMED)
def test_malformed_calls_are_content(parser: type[MessageParser], text: str) -> None:
    assert parse_calls(parser(tools=TOOLS), text) == (text, [])


def test_arguments_that_become_malformed_end_there() -> None:
    text = 'x <tool_call>{"name": "add", "arguments": {"a": 1, b}}</tool_call> y'
    assert parse_calls(HermesParser(), text) == ("xb}}</tool_call> y", [ToolCall("add", '{"a": 1, ')])
    cut = parse_calls(HermesParser(), text[: text.index("1") + 1])
    assert cut == ("x", [ToolCall("add", '{"a": 1')])


def test_deep_nesting_is_malformed() -> None:
    deep = '<tool_call>{"arguments": ' + "[" * 100_000
    assert parse_calls(HermesParser(), deep) == (deep, [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add"}', [ToolCall("add", "{}")]),
        ('{"name": "add", "arguments": null}', [ToolCall("add", "{}")]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ToolCall("add", '{"a": 1}')]),
        ('{"id": 3, "arguments": { "a" :1 }, "name": "add"}', [ToolCall("add", '{ "a" :1 }')]),
        ('[{"name": "a", "arguments": {}}, {"name": "b"}]', [ToolCall("a", "{}"), ToolCall("b", "{}")]),
    ],
)
def test_forms_of_a_call_in_json(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(HermesParser(), f"<tool_call>{text}</tool_call>") == ("", calls)
    assert parse_calls(HermesParser(), f"<tool_call>{text}") == ("", calls), "the last tag may be missing"


def test_values_of_xml_calls_have_the_types_of_the_schema() -> None:
    values = {"text": "1", "count": "2", "ratio": "1e2", "flag": "True", "items": "[1]", "either": "None", "other": "3"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    _, (call,) = parse_calls(Qwen3CoderParser(tools=TOOLS), f"<function=add>\n{text}</function>")
    expected = {"text": "1", "count": 2, "ratio": 100.0, "flag": True, "items": [1], "either": None, "other": "3"}
    assert json.loads(call.arguments) == expected
    text = "<parameter=count>two</parameter><parameter=ratio>NaN</parameter>"
    _, (wrong,) = parse_calls(Qwen3CoderParser(tools=TOOLS), f"<function=add>{text}</function>")
    assert json.loads(wrong.arguments) == {"count": "two", "ratio": "NaN"}


def test_values_of_deepseek_are_text_or_json() -> None:
    values = {
        "text": ("true", "1"),
        "count": ("false", " 2 "),
        "wrong": ("false", "two"),
        "items": ("false", '["<a>"]'),
        "number": ("false", "NaN"),
    }
    parameters = "".join(
        f'<{BAR}DSML{BAR}parameter name="{key}" string="{flag}">{value}</{BAR}DSML{BAR}parameter>'
        for key, (flag, value) in values.items()
    )
    text = f'<{BAR}DSML{BAR}invoke name="add">{parameters}</{BAR}DSML{BAR}invoke>'
    _, (call,) = parse_calls(DeepSeekV32Parser(), text)
    assert json.loads(call.arguments) == {"text": "1", "count": 2, "wrong": "two", "items": ["<a>"], "number": "NaN"}


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("[add()]", "", ["{}"]),
        (" [ add( count = 1 ), add(flag=True,) ]\n", "", ['{"count": 1}', '{"flag": true}']),
        (r"""[add(text='a\n"\x41\u00e9\'', items=[1, 'b)'])]""", "", [r"""{"text": "a\n\"Aé'", "items": [1, "b)"]}"""]),
        ("[add(count={1, 2})]", "{1, 2})]", ['{"count": ']),
        ("[add(ratio=1e999)]", "1e999)]", ['{"ratio": ']),
        ("[add(text='a", "", ['{"text": "a']),
    ],
)
def test_calls_in_python(text: str, content: str, arguments: list[str]) -> None:
    assert parse_calls(PythonicParser(tools=TOOLS), text) == (content, [ToolCall("add", each) for each in arguments])


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes ", "", {"reasoning": "hm", "content": "yes "}),
        ("hm</think>yes", "user\nassistant\n<think>\n", {"reasoning": "hm", "content": "yes"}),
        ("hm", "<think>", {"reasoning": "hm"}),
        ("<think>\n\n</think>\n\nyes", "", {"content": "yes"}),
        ("The tag <think> begins.</think>", "What is <think>?", {"content": "The tag <think> begins.</think>"}),
        ("<thin", "", {"content": "<thin"}),
        ("<think>a</thi", "", {"reasoning": "a</thi"}),
    ],
)
def test_reasoning_within_tags(text: str, prompt: str, expected: dict[str, str]) -> None:
    assert parts(run(ThinkParser(prompt=prompt), [text])) == expected


def test_messages_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>A plan.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Go.<|end|>" + write_harmony([("add", {"count": 1})])
    )
    chain = ParserChain(HarmonyReasoningParser(), HarmonyParser())
    expected = {"reasoning": "Need it.\nGo.", "content": "A plan.", (0, "add"): '{"count": 1}'}
    assert parts(run(chain, [text])) == expected
    final = "<|channel|>final<|message|>2 + 2 = 4."
    assert parts(run(ParserChain(HarmonyReasoningParser(), None), [final])) == {"content": "2 + 2 = 4."}
    without = ParserChain(HarmonyReasoningParser(), None)
    assert "to=functions.add" in parts(run(without, [text]))["content"], "calls are content if there are no tools"
    builtin = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert parts(run(ParserChain(HarmonyReasoningParser(), HarmonyParser()), [builtin])) == {"content": builtin}
    begun = ' to=functions.add<|channel|>commentary json<|message|>{"count": 1}'
    assert parts(run(ParserChain(HarmonyReasoningParser(), HarmonyParser()), [begun])) == {(0, "add"): '{"count": 1}'}


def test_adjacent_deltas_are_merged() -> None:
    call = MessageDelta("call", "", 0, "add")
    deltas = [MessageDelta("content", "a"), MessageDelta("content", "b"), call, MessageDelta("call", "{}", 0)]
    assert merge_deltas(deltas) == [MessageDelta("content", "ab"), MessageDelta("call", "{}", 0, "add")]
    assert merge_deltas([MessageDelta("content", ""), call]) == [call]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("""within tags:\n<tool_call>\n{\\"name\\": <function-name>""", "hermes"),
        ("""{{ "<tool_call>\n" }}{{- '{"name": ' }}""", "hermes"),
        ("{{ '[TOOL_CALLS]' + tool.name }}", "mistral"),
        (f"{{{{ '{deepseek('tool call begin')}' }}}}", "deepseek_v3"),
        (f"""{{{{ '<{BAR}DSML{BAR}invoke name=' }}}}""", "deepseek_v32"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder"),
        ('{{ "<|channel|>final<|message|>" }}', "gpt_oss"),
        ("""the format {"name": function name, "parameters": dictionary of argument name}""", "llama3_json"),
        ("in the format of [func_name1(params_name1=params_value1, ...)]", "pythonic"),
        ("<tool_call>{function-name}\n<arg_key>", None),
        (None, None),
    ],
)
def test_the_template_decides(template: str | None, name: str | None) -> None:
    expected = None if name is None else registries.tool_parsers[name]
    assert choose_parser(registries.tool_parsers, template) is expected


def test_names_decide_over_the_template() -> None:
    assert choose_parser(registries.reasoning_parsers, "</think>", "none") is None
    assert choose_parser(registries.reasoning_parsers, "</think>", "mistral") is MistralReasoningParser
    assert choose_parser(registries.reasoning_parsers, "</think>") is ThinkParser
    with pytest.raises(UnknownName, match=r"'hermess' among tool_parsers. Did you mean 'hermes'\?.*none, deepseek_v3"):
        choose_parser(registries.tool_parsers, None, "hermess")


def test_templates_of_several_formats_need_a_name() -> None:
    entries = {name: Entry(name, parser, "p") for name, parser in (("a", ThinkParser), ("b", HarmonyReasoningParser))}
    registry: Registry[Any] = Registry("reasoning_parsers", lambda: (entries, {}))
    both = "</think> <|channel|> <|message|>"
    with pytest.raises(ConfigError, match=r"several reasoning_parsers: a, b\. Choose one with --reasoning-parser"):
        choose_parser(registry, both)
    assert choose_parser(registry, both, "b") is HarmonyReasoningParser
    entries["a"] = Entry("a", parse_calls, "p")
    with pytest.raises(PluginError, match=r"reasoning_parsers 'a' is <function .*derived from MessageParser"):
        choose_parser(Registry("reasoning_parsers", lambda: (entries, {})), both)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists, max_leaves=5
    )
    | st.dictionaries(st.text(), st.integers()),
    rest=st.sampled_from(["", " ", "x", "}", ","]),
)
def test_the_scanner_finds_the_end_of_json(value: Any, rest: str) -> None:
    text, scanner = json.dumps(value), JsonScanner()
    states = []
    for character in text + rest:
        states.append(scanner.push(character))
        if states[-1] != "open":
            break
    is_scalar = not text.startswith(("[", "{", '"'))
    if is_scalar and (not rest or rest == "x"):
        assert scanner.end_scalar() == (not rest)
    elif is_scalar:
        assert states[-1] == "complete before" and len(states) == len(text) + 1
    else:
        assert states[-1] == "complete" and len(states) == len(text)


@given(st.text(alphabet='{}[],:"\\ u0a1-.eEtrufalsn', max_size=12))
def test_the_scanner_accepts_what_json_accepts(text: str) -> None:
    scanner = JsonScanner()
    accepted = None
    for place, character in enumerate(text):
        state = scanner.push(character)
        if state == "complete":
            accepted = text[: place + 1]
            break
        if state != "open":
            break
    try:
        json.loads(text)
        is_json = text.strip().startswith(("{", "[", '"'))
    except ValueError:
        is_json = False
    assert not is_json or accepted == text.rstrip()
    if accepted is not None:
        json.loads(accepted)
