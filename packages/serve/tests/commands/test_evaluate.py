"""What `stack evaluate` refuses; integration_tests/parity/test_lm_eval.py compares what it measures with PyTorch."""

import sys

import pytest

from stack_core.abi.errors import ConfigError
from stack_serve.commands.evaluate import evaluate


def test_without_the_harness_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"(?s)Benchmarks are those of lm_eval.*\[evaluate\]"):
        evaluate("hf:DIR", tasks="arc_easy")


@pytest.mark.parametrize(
    ("target", "options", "problem"),
    [
        ("runs/x", {"tasks": " , "}, "--tasks names no task"),
        (
            "runs/x",
            {"tasks": "arc_easy", "tokenizer": "hf:DIR"},
            "--tokenizer has no effect on a model in this process",
        ),
        ("http://127.0.0.1:1", {"tasks": "arc_easy", "adapter": "runs/y"}, "--adapter has no effect on a server"),
        (
            "http://h",
            {"tasks": "gsm8k", "chat": True, "tokenizer": "x"},
            "--tokenizer has no effect on answers to chats",
        ),
    ],
)
def test_options_that_would_have_no_effect_are_refused(target: str, options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        evaluate(target, **options)
