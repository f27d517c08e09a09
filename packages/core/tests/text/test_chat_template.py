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
