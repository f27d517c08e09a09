"""Which tokens of conversations are learned, with tokenizers of every kind."""

import json
from types import SimpleNamespace

import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ChatTemplateError, DataError
from stack_train.data.conversations import Tokenization
from stack_train.data.kinds.chat import ChatData
from stack_train.data.kinds.judged import JudgedData
from stack_train.data.kinds.preferences import PreferenceData, _pair
from stack_train.data.tokenizer import HuggingFaceTokenizer

from .tokenizer_kinds import KINDS, write_kind

TURN = "{% if m.role == 'assistant' %}Assistant: {% generation %}{{ m.content }}<|end|>{% endgeneration %}"
MARKED = "{% for m in messages %}" + TURN + "{% else %}<|user|>{{ m.content }}\n{% endif %}{% endfor %}"
MARKED += "{% if add_generation_prompt %}Assistant: {% endif %}"
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TEMPLATES = {"marked": MARKED, "plain": PLAIN}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris is the capital."}
LEARNED = " Paris is the capital.<|end|>"  # the first token holds the space of the template
MODEL = SimpleNamespace(vocab_size=10_000, max_positions=256)


def tokenization(directory, kind, template=None):
    return Tokenization.by_template_of(HuggingFaceTokenizer.load(write_kind(directory, kind, template)))


def text_of(tokenizer, tokens):
    return b"".join(tokenizer.token_bytes(int(token)) for token in tokens).decode()


def learned(tokens, conversation):
    return text_of(tokens._tokenizer, conversation.tokens[conversation.supervised])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_of_an_answer_is_learned(tmp_path, kind, template):
    tokens = tokenization(tmp_path, kind, TEMPLATES[template])
    (one,) = (tokens.conversation("a:1", record) for record in [{"messages": [QUESTION, ANSWER]}])
    assert learned(tokens, one) == LEARNED
    two = tokens.conversation("a:1", {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "😀 is naïve"}]})
    assert learned(tokens, two) == LEARNED + " 😀 is naïve<|end|>"
    last = tokens.conversation("a:1", {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert learned(tokens, last) == LEARNED and last.supervised[len(last.tokens) // 2 :].sum() == last.supervised.sum()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_learned_of_every_kind_of_data(tmp_path, kind, template):
    write_kind(tmp_path / "tokenizer", kind, TEMPLATES[template])
    other = [{**QUESTION, "content": "User"}]
    sections = {
        ChatData: [{"prompt": [QUESTION], "completion": [ANSWER]}] * 2,
        PreferenceData: [{"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]}] * 2,
        JudgedData: [
            {"prompt": prompt, "completion": [ANSWER], "label": True} for prompt in ([QUESTION], other, [QUESTION])
        ],
    }
    for section, records in sections.items():
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        options = {"packed": False} if section is ChatData else {"reference": False}
        fields = {"source": str(path), "tokenizer": str(tmp_path / "tokenizer"), "seq_tokens": 128, "batch_size": 2}
        batches = section(**fields, validation_fraction=0.0, **options).build(seed=0, model=MODEL)
        for row in next(batches.train_iterator())["targets"].reshape(-1, 128):
            assert text_of(batches.tokenizer, row[row != IGNORED_TARGET]) == LEARNED


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_is_the_text_that_follows_its_prompt(tmp_path, kind):
    tokens = tokenization(tmp_path, kind)
    for prompt, completion in [("What is the capital?", " Paris is"), ("France", "is the capital")]:
        one = tokens.conversation("a:1", {"prompt": prompt, "completion": completion})
        assert learned(tokens, one) == completion + "<|end|>"
        assert text_of(tokens._tokenizer, one.tokens).lstrip() == f"{prompt}{completion}<|end|>"
    astride = tokens.conversation("a:1", {"prompt": "Assistant: ", "completion": "Paris"})
    assert text_of(tokens._tokenizer, astride.tokens).lstrip() == "Assistant: Paris<|end|>"
    assert learned(tokens, astride).lstrip() == "Paris<|end|>"


def test_a_space_that_ends_an_answer_is_learned(tmp_path):
    tokens = tokenization(tmp_path, "byte-level, trimmed offsets", MARKED)
    one = tokens.conversation("a:1", {"messages": [QUESTION, {**ANSWER, "content": "Paris "}]})
    assert learned(tokens, one) == " Paris <|end|>"


def test_no_end_of_text_stands_between_a_prompt_and_its_completion(tmp_path):
    written = json.loads((write_kind(tmp_path, "byte-level") / "tokenizer.json").read_text())
    ends = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": []}
    ends["single"].append({"SpecialToken": {"id": "<|end|>", "type_id": 0}})
    ends["special_tokens"] = {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}}
    ends["pair"] = [*ends["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    written["post_processor"] = {"type": "Sequence", "processors": [written["post_processor"], ends]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokens = Tokenization.by_template_of(HuggingFaceTokenizer.load(tmp_path))
    one = tokens.conversation("a:1", {"prompt": "What is", "completion": " Paris"})
    assert text_of(tokens._tokenizer, one.tokens) == "What is Paris<|end|>"
    assert learned(tokens, one) == " Paris<|end|>"


TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}]
CALLS = (
    "{% if tools %}Tools: {{ tools | map(attribute='function.name') | join }} {% endif %}{{ style }}\n"
    "{% for m in messages %}<|user|>{{ m.role }}: {% generation %}{% for c in m.tool_calls %}{{ c.function.name }} "
    "{{ c.function.arguments.what }}{% endfor %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"
)


def test_the_template_gets_a_records_tools_and_variables(tmp_path):
    tokens = tokenization(tmp_path, "byte-level", CALLS)
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"what": "Paris"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "capital"},
        ANSWER,
    ]
    record = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"style": "naïve"}}
    text = text_of(tokens._tokenizer, tokens.conversation("a:1", record).tokens)
    assert text.startswith("Tools: find naïve\n<|user|>user: What")
    assert "<|user|>assistant: find Paris<|end|><|user|>tool: capital<|end|><|user|>assistant: Paris is" in text
    for field in ("chosen", "completion"):
        pair = {"prompt": [QUESTION], field: [ANSWER], "rejected": [ANSWER], "label": True, "tools": TOOLS}
        read = _pair(tokens, "a:1", pair).chosen if field == "chosen" else tokens.conversation("a:1", pair)
        assert text_of(tokens._tokenizer, read.tokens).startswith("Tools: find")


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"messages": [{**QUESTION, "role": "usr"}, ANSWER]}, ChatTemplateError, r"role is 'usr'.*Did you mean 'user'"),
        ({"messages": [{"role": "user"}, ANSWER]}, ChatTemplateError, r"messages\.0\.content is missing"),
        ({"messages": [QUESTION, ANSWER], "tools": TOOLS}, ChatTemplateError, "does not read tools"),
        ({"messages": [QUESTION, ANSWER], "tools": "find"}, ChatTemplateError, "tools is not a list of JSON schemas"),
        (
            {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"think": True}},
            ChatTemplateError,
            "reads no variable 'think'",
        ),
        (
            {"messages": [QUESTION, ANSWER], "chat_template_kwargs": [1]},
            ChatTemplateError,
            "chat_template_kwargs is a list",
        ),
        ({"prompt": "x", "completion": "y", "tools": TOOLS}, DataError, "tools are for a chat template"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{}]}]}, ChatTemplateError, "tool_calls is not supported"),
    ],
)
def test_a_refusal_names_the_file_and_the_line(tmp_path, write_jsonl, record, error, message):
    write_kind(tmp_path / "tokenizer", "byte-level", MARKED)
    source = write_jsonl([{"messages": [QUESTION, ANSWER]}, record])
    section = ChatData(source=str(source), tokenizer=str(tmp_path / "tokenizer"), seq_tokens=128)
    with pytest.raises(error, match=rf"records\.jsonl:2:? .*{message}"):
        section.build(seed=0, model=MODEL)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"messages": [{"role": "user", "content": "caf\\ud83d"}]}',
            r"'messages\.0\.content' has half a surrogate pair at 3",
        ),
        ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
)
def test_lines_that_no_tokenizer_takes_are_named(tmp_path, line, message):
    write_kind(tmp_path / "tokenizer", "byte-level", MARKED)
    (tmp_path / "chats.jsonl").write_text(line)
    section = ChatData(source=str(tmp_path / "*.jsonl"), tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(DataError, match=rf"chats\.jsonl:1: .*{message}"):
        section.build(seed=0, model=MODEL)
