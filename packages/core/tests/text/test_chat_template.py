from typing import Any

import pytest

from stack_core.abi.errors import ChatTemplateError
from stack_core.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_blocks_leave_no_empty_lines() -> None:
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hi\n"


def test_special_tokens_and_the_prompt_of_the_answer() -> None:
    source = "{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}"
    assert render(source) == "<s>A:"
    assert render(source, add_generation_prompt=False) == "<s>"


def test_json_is_not_escaped_for_html() -> None:
    message = {"role": "user", "content": "<é>'"}
    assert render("{{ messages[0].content | tojson }}", [message]) == '"<é>\'"'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'


def test_loop_controls_generation_tags_and_dates() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_template_can_refuse() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('Begin with the system.') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match=r"does not take these messages: Begin with the system\."):
        render(source)


@pytest.mark.parametrize("source", ["{{ messages[7].content }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"])
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not take these messages"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not take these messages"):
        render(source)


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"cannot be read.*--chat-template FILE"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for part in messages[0]['content'] %}{{ part.text }}|{% endfor %}", "Hi|"),
        ("{% for part in messages[0].content %}{{ part['text'] }}|{% endfor %}", "Hi|"),
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
            "{% for part in messages[0].content %}{{ part.text }}|{% endfor %}{% endif %}",
            "Hi",
        ),
    ],
)
def test_content_has_the_form_that_the_template_goes_through(source: str, content: str) -> None:
    assert render(source) == content
    assert render(source, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == content


@pytest.mark.parametrize(
    ("source", "content", "prompt"),
    [
        ("[{{ messages[-1].content }}]", "Once ", "[Once "),
        ("[{{ messages[-1].content | trim }}]", "Once ", "[Once"),
        ("[{{ messages[-1].content | trim }}]", " Once", "[Once"),
        ("{% for part in messages[-1].content %}[{{ part.text }}]{% endfor %}", "Once", "[Once"),
    ],
)
def test_the_last_message_is_cut_at_its_end(source: str, content: str, prompt: str) -> None:
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": content}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == prompt


@pytest.mark.parametrize("content", ["", "  "])
def test_an_empty_message_cannot_be_continued(content: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render("{{ messages[0].content }}", messages, add_generation_prompt=False, continue_final_message=True)


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello <é> "},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello"},
]
IN_A_LOOP = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
IN_A_MACRO = (
    "{% macro turn(m) %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}</s>{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for m in messages %}{{ turn(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "written"),
    [(IN_A_LOOP, ["Hello <é> </s>", "Hello</s>"]), (IN_A_MACRO, ["Hello <é>", "Hello"])],
)
def test_spans_are_what_the_assistant_wrote(source: str, written: list[str]) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    text, spans = template.render_spans(TURNS)
    assert text == template.render(TURNS, add_generation_prompt=False)
    assert [text[begin:end] for begin, end in spans] == written
    assert all(text[:begin].endswith("[assistant]") for begin, _ in spans)


def test_spans_hold_whatever_characters_a_message_has() -> None:
    odd = [{"role": "assistant", "content": "".join(map(chr, range(0xF0000, 0xF0005))) + "__generation_begin"}]
    text, spans = ChatTemplate(IN_A_LOOP, {"bos_token": "<s>"}).render_spans(odd)
    assert [text[begin:end] for begin, end in spans] == [odd[0]["content"] + "</s>"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ messages[0].content }}", r"does not mark the assistant.*\{% generation %\}"),
        ("{% filter trim %}{% generation %} Hi {% endgeneration %}{% endfilter %}", "changes the text of a"),
        ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "changes the text of a"),
    ],
)
def test_spans_that_are_not_certain_are_refused(source: str, problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        ChatTemplate(source, {}).render_spans(TURNS)


def test_variables_are_those_that_the_template_reads() -> None:
    assert render("{{ 'yes' if enable_thinking else 'no' }}", variables={"enable_thinking": True}) == "yes"
    for name in ("style", "raise_exception", "messages", "bos_token"):
        with pytest.raises(ChatTemplateError, match=f"reads no variable '{name}'; it reads: enable_thinking") as caught:
            render("{{ enable_thinking }}{{ raise_exception }}{{ bos_token }}", variables={name: "x"})
        assert caught.value.parameter == "chat_template_kwargs"


def test_a_role_that_no_template_names_is_a_slip() -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\.1\.role is 'usr'.*Did you mean 'user'") as caught:
        render("{{ messages[0].role }}", [USER, {"role": "usr", "content": "Hi"}])
    assert caught.value.parameter == "messages.1.role"
    source = "{% for m in messages %}{{ '*' if m.role == 'critic' }}{{ m.content }}{% endfor %}"
    assert render(source, [USER, {"role": "critic", "content": "No."}]) == "Hi*No."


CALLS = "{% for c in messages[-1].tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"what": 1}}}


@pytest.mark.parametrize("call", [CALL, {**CALL, "function": {**CALL["function"], "arguments": '{"what": 1}'}}])
def test_calls_of_tools_are_read_with_their_arguments_as_objects(call: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(CALLS, [USER, message]) == 'find{"what": 1}'


@pytest.mark.parametrize(
    ("source", "message", "problem"),
    [
        ("", {"tool_calls": [CALL]}, "tool_calls is not supported here"),
        (CALLS, {"tool_calls": "find"}, r"tool_calls is not a list of calls"),
        (CALLS, {"tool_calls": [{"function": "find"}]}, r"tool_calls\.0 is not a call"),
        (
            CALLS,
            {"tool_calls": [{"name": "find", "arguments": "x"}]},
            r"tool_calls\.0: the arguments are not a JSON object",
        ),
        ("", {"mood": "good"}, "mood is not a text field that the model"),
    ],
)
def test_fields_that_a_template_does_not_read_are_refused(source: str, message: Any, problem: str) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        render(source, [{"role": "assistant", "content": "x", **message}])


def test_thoughts_pass_to_a_template_that_reads_them() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert render("<{{ messages[0].reasoning_content }}>{{ messages[0].content }}", [message]) == "<2+2>4"


CALL = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a1", "name": "add", "content": "5"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}", '{"x": 1}'),
        ("{% for c in messages[1].tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}", 'f{"x": 1}'),
        ("{% for c in messages[1].get('tool_calls') %}{{ c.function.name }}{% endfor %}", "add"),
        ("{{ 'none' if messages[1].content is none }}{{ messages[1].tool_calls | length }}", "none1"),
        ("{{ messages[1].content + messages[2].content }}{{ messages[1].tool_calls | length }}", "51"),
        ("{{ messages[1].content is none }}{{ messages[1].content + messages[1].tool_calls[0].id }}", "Falsea1"),
    ],
)
def test_tool_calls_have_the_form_that_the_template_reads(source: str, expected: str) -> None:
    assert render(source, [USER, CALLING, RESULT]) == expected


def test_calls_that_a_template_reads_one_by_one_are_messages_of_their_own() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}({{ m.tool_calls[0].function.name }})"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "abc"]
    calling = {"role": "assistant", "content": "Look.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "cab"]
    assert render(source, [USER, calling, *results, USER]) == "Hi;Look.(a);A;(b);B;(c);C;Hi;"
    in_order = [{"role": "tool", "content": name.upper()} for name in "abc"]
    assert render(source, [USER, calling, *in_order, USER]) == "Hi;Look.(a);A;(b);B;(c);C;Hi;"
    assert render(source, [USER, calling]) == "Hi;Look.(a);(b);(c);"
    again = [USER, calling, *results, calling, *results]
    assert render(source, again) == "Hi;" + 2 * "Look.(a);A;(b);B;(c);C;", "ids may return in a later turn"
    with pytest.raises(ChatTemplateError, match=r"messages\.1\.tool_calls is not a list"):
        render(source, [USER, {**calling, "tool_calls": "abc"}, *results])
    looping = "{{ messages[1].tool_calls[0].id }}{% for c in messages[1].tool_calls %}{{ c.id }}{% endfor %}"
    assert render(looping, [USER, calling, *results]) == "aabc"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].reasoning_content }}", "Hm."),
        ("{{ messages[0].thinking }}", "Hm."),
        ("{{ messages[0].content }}", "Yes"),
    ],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_has_the_name_that_the_template_reads(source: str, expected: str, name: str) -> None:
    assert render(source, [{"role": "assistant", "content": "Yes", name: "Hm."}]) == expected
    with pytest.raises(ChatTemplateError, match=r"messages\.0\.reasoning_content is not a text"):
        render(source, [{"role": "assistant", "content": "Yes", name: ["Hm."]}])


def test_reasoning_beside_the_text_of_a_call_is_left_out_if_the_template_refuses_it() -> None:
    source = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    )
    calling = {**CALLING, "content": "Look.", "reasoning_content": "Hm."}
    assert render(source + "{{ m.tool_calls | length }}{% endfor %}", [calling, RESULT]) == "Look.150"
    with pytest.raises(ChatTemplateError, match="does not take these messages: no"):
        render(source + "{% endfor %}", [{"role": "assistant", "content": "x", "reasoning_content": "Hm."}])


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", {"enable_thinking": False}),
        ("{% if thinking is not defined %}{% set thinking = true %}{% endif %}{{ thinking }}", {"thinking": False}),
    ],
)
def test_the_effort_of_reasoning_is_a_variable(source: str, variables: dict[str, Any]) -> None:
    assert ChatTemplate(source, {}).effort_variables("none") == variables
    with pytest.raises(ChatTemplateError, match="has no variable for the effort"):
        ChatTemplate("{{ messages }}", {}).effort_variables("low")
