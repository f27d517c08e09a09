import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from stack_core.abi import model_formats
from stack_core.abi.errors import PluginError
from stack_core.abi.plugins import registries
from stack_core.cli import main
from stack_serve.http.server import HttpServer
from stack_serve.llm.config import SpeculationConfig

from ..openai.fake_engine import FakeEngine, checkpoint


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets options of its process, which here is that of all tests."""
    monkeypatch.setattr("stack_serve.commands.serve_language_model.keep_compiled", lambda: None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[HttpServer]:
    """Servers that would run, which announce themselves and end."""
    servers: list[HttpServer] = []

    def run(self: HttpServer) -> None:
        servers.append(self)
        self._announce("http://127.0.0.1:8000")

    monkeypatch.setattr(HttpServer, "run", run)
    monkeypatch.setattr(model_formats, "open_for_generation", lambda address, encoders: checkpoint(name=address))
    return servers


def refusal(capsys: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


NUMBERS = {
    "max-sequences": ("0", "65537"),
    "page-tokens": ("0", "65537"),
    "pages": ("0", "2147483648"),
    "max-adapters": ("0", "65537"),
    "memory-fraction": ("0", "nan", "1.1"),
    "drain-s": ("-1", "inf", "nan"),
    "timeout-s": ("0", "inf", "nan"),
    "port": ("-1", "65536", "80.5"),
    "step-tokens": ("31",),  # fewer than sequences
    **dict.fromkeys(
        ("max-tokens", "decode-repeats", "tensor", "adapter-rank", "max-waiting", "max-body-bytes"),
        ("0",),
    ),
    **dict.fromkeys(("priorities",), ("-1",)),
    **dict.fromkeys(("data-parallel", "expert", "hosts"), ("0",)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_are_refused(served: list[HttpServer], name: str, capsys: Any) -> None:
    for value in (*NUMBERS[name], "one", "1e400" if name != "memory-fraction" else "2"):
        assert "error: " in refusal(capsys, "RUN", f"--{name}={value}")
    assert not served


def test_options_of_repositories_do_nothing_for_a_model(served: list[HttpServer], tmp_path: Path, capsys: Any) -> None:
    for name in ("live-versions", "poll-s", "grpc-port"):
        assert f"--{name}: for a repository of bundles only" in refusal(capsys, "RUN", f"--{name}=1")
    for name, values in {"live-versions": ("-1", "1.5"), "poll-s": ("-1", "inf", "nan"), "grpc-port": ("-1",)}.items():
        for value in values:
            assert value in refusal(capsys, "--repository", str(tmp_path), f"--{name}={value}")


def test_several_engines_need_devices_a_router_and_a_language_model(served: list[HttpServer], capsys: Any) -> None:
    assert "router: Input should be 'cache_aware' or 'round_robin' (given 'best')" in refusal(
        capsys, "RUN", "--data-parallel=2", "--router=best"
    )
    assert "Add --data-parallel 2" in refusal(capsys, "RUN", "--router=cache_aware")
    assert "--data-parallel: for the engine llm, not for static" in refusal(
        capsys, "RUN", "--engine=static", "--data-parallel=2"
    )
    for extra in (["--no-prefix-caching"], ["--speculation=draft", "--draft-model=SMALL"]):
        assert "Leave one of the options out" in refusal(capsys, "RUN", "--prefill-engines=1", *extra)
    assert "--data-parallel: for language models only" in refusal(capsys, "--repository=.", "--data-parallel=2")
    assert not served


def test_an_engine_over_hosts_refuses_what_needs_one_host(served: list[HttpServer], capsys: Any) -> None:
    over_two = ("RUN", "--hosts=2", "--tensor=2")
    for option in ("launcher=ray", "cluster-address=10.0.0.1:1", "token-file=x"):
        assert f"--{option.partition('=')[0]}: only for several hosts" in refusal(capsys, "RUN", f"--{option}")
    assert "--sleep-mode, --weight-updates: not available with --hosts 2" in refusal(
        capsys, *over_two, "--sleep-mode", "--weight-updates"
    )
    assert "embeddings: not available on an engine over hosts=2" in refusal(capsys, *over_two, "--embeddings")
    assert "hosts=2 and data_parallel=2: only one engine" in refusal(capsys, *over_two, "--data-parallel=2")
    assert "Use a multiple of 2, such as tensor=2 (--tensor 2)" in refusal(capsys, "RUN", "--hosts=2")
    assert "--hosts: for the engine llm, not for static" in refusal(capsys, "RUN", "--engine=static", "--hosts=2")
    assert not served


def test_options_of_texts_do_nothing_for_an_image_model(
    served: list[HttpServer], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert "--max-images: for image models only" in refusal(capsys, "RUN", "--max-images=2")
    monkeypatch.setattr("stack_core.text.image_models.has_image_model", lambda address: True)
    for option in ("max-tokens=8", "tool-parser=hermes", "engine=llm"):
        assert f"--{option.partition('=')[0]}: not for RUN, which generates images" in refusal(
            capsys, "RUN", f"--{option}"
        )
    assert not served


def test_options_reach_the_server(served: list[HttpServer], tmp_path: Path, capsys: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("second\n\nthird\n", encoding="utf-8")
    keys_given = ["--api-key", "first", "--api-key-file", str(keys)]
    names = ["--model-name", "a", "--model-name", "b"]
    others = ["--port", "0", "--timeout-s", "9", "--max-tokens", "100", "--cors-origin", "*", "--json"]
    main(["serve", "RUN", *keys_given, *names, *others])
    (server,) = served
    service = server._app.service
    config = service.config
    assert (config.port, config.timeout_s, config.cors_origins) == (0, 9.0, ("*",))
    assert config.api_keys == ("first", "second", "third")
    assert service.names == ("a", "b") and service.max_tokens == 100
    out, err = capsys.readouterr()
    assert json.loads(out) == {"address": "http://127.0.0.1:8000", "model": "a", "process": os.getpid()}
    assert err == "stack: loading RUN\nstack: a is served at http://127.0.0.1:8000/v1\n"


def test_a_person_is_shown_what_to_try(served: list[HttpServer], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["serve", "RUN", "--model-name", "a"])
    steps = [line.split(maxsplit=3)[3] for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    page, chat, curl = steps
    assert (page, chat) == ("http://127.0.0.1:8000/", "stack chat http://127.0.0.1:8000")
    command, address, *_, body = shlex.split(curl)
    assert (command, address) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    assert json.loads(body)["model"] == "a"


def test_a_key_of_the_environment_counts_where_none_is_given(
    served: list[HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACK_API_KEY", "secret")
    main(["serve", "RUN", "--port", "0"])
    main(["serve", "RUN", "--port", "0", "--api-key", "given"])
    monkeypatch.setenv("STACK_API_KEY", "")
    main(["serve", "RUN", "--port", "0"])
    assert [server._app.service.config.api_keys for server in served] == [("secret",), ("given",), ()]


def test_help_tells_the_truth(capsys: Any) -> None:
    main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "status 503 until the first programs are compiled" in shown and "--memory-fraction" in shown


def test_an_engine_of_another_class_is_refused(served: list[HttpServer], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"odd": lambda checkpoint: {"checkpoint": checkpoint}}
    monkeypatch.setattr(registries, "engines", engines)
    main(["serve", "RUN", "--port", "0", "--engine", "odd"])
    with pytest.raises(PluginError, match="engines 'odd' constructed a dict"):
        served[0]._app.make_engine()


def test_the_engine_is_made_of_its_options(
    served: list[HttpServer], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made: list[Any] = []
    engines = {"llm": lambda *given, progress: made.extend((*given, progress)) or FakeEngine()}
    monkeypatch.setattr(registries, "engines", engines)
    main(
        [
            "serve",
            "RUN",
            "--port",
            "0",
            "--max-num-seqs",
            "3",
            "--max-num-batched-tokens",
            "64",
            "--max-model-len",
            "128",
            "--no-prefix-caching",
            "--dequantize",
            "--cache-dtype",
            "int8",
            "--memory-fraction",
            "0.3",
            "--adapter",
            "mine=runs/lora",
            "--adapter",
            "yours=peft:a=b",
            "--max-adapters",
            "2",
        ]
    )
    (server,) = served
    server._app.make_engine()
    _, config, progress = made
    assert (config.max_sequences, config.prefix_caching, config.cache_dtype) == (3, False, "int8")
    assert (config.step_tokens, config.max_tokens) == (64, 128) and config.dequantize
    assert config.memory_fraction == 0.3 and config.max_adapters == 2
    assert config.adapters == {"mine": "runs/lora", "yours": "peft:a=b"}
    assert server._app.service.adapters == ("mine", "yours")
    capsys.readouterr()
    for done in (1, 2, 9):
        progress("decode of 8", done, 9)
        assert server._app.service.progress == f"compiled {done} of 9 programs, most recently decode of 8"
    lines = [f"stack: compiled {done} of 9 programs, most recently decode of 8" for done in (1, 9)]
    assert capsys.readouterr().err.splitlines() == lines, "off a terminal, a line now and then"


@pytest.mark.parametrize("given", ["ngram", '{"method": "ngram", "tokens": 5}'])
def test_speculation_is_a_method_or_settings(
    served: list[HttpServer], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    made: list[Any] = []
    engines = {"llm": lambda *given, progress: made.extend(given) or FakeEngine()}
    monkeypatch.setattr(registries, "engines", engines)
    main(["serve", "RUN", "--port", "0", "--speculation", given])
    served[0]._app.make_engine()
    assert made[1].speculation == SpeculationConfig(tokens=5 if "tokens" in given else 7)
    main(["serve", "RUN", "--port", "0", "--speculation", "draft", "--draft-model", "SMALL"])
    served[1]._app.make_engine()
    assert made[3].speculation == SpeculationConfig(method="draft") and made[3].draft_model == "SMALL"


def test_other_speculation_is_refused(served: list[HttpServer], capsys: Any) -> None:
    assert "'ngram'" in refusal(capsys, "RUN", "--speculation", "eagle")
    assert "token" in refusal(capsys, "RUN", "--speculation", '{"token": 5}')
    assert "Give ngram, draft or mtp, or its settings as JSON" in refusal(
        capsys, "RUN", "--speculation", "{method: ngram}"
    )
    assert "the method draft needs a draft_model" in refusal(capsys, "RUN", "--speculation", "draft")
    assert "draft_model='SMALL' is for the method draft" in refusal(capsys, "RUN", "--draft-model", "SMALL")
    matches = '{"method": "draft", "min_match": 3}'
    assert "are for the method ngram" in refusal(capsys, "RUN", "--speculation", matches, "--draft-model", "SMALL")
    assert "--speculation is for the engine llm" in refusal(
        capsys, "RUN", "--engine", "static", "--speculation", "ngram"
    )


def test_loading_of_adapters_that_no_program_could_apply_is_warned_of(served: list[HttpServer], capsys: Any) -> None:
    main(["serve", "RUN", "--port", "0", "--adapter-loading"])
    assert "warning: --adapter-loading: the server has no adapters" in capsys.readouterr().err
    main(["serve", "RUN", "--port", "0", "--adapter-loading", "--adapter", "mine=runs/lora"])
    assert "warning" not in capsys.readouterr().err


def test_whoever_may_reach_it_is_warned_of(served: list[HttpServer], capsys: Any) -> None:
    main(["serve", "RUN", "--host", "0.0.0.0", "--port", "0"])
    assert "warning: any client that reaches 0.0.0.0 can use the model" in capsys.readouterr().err
    main(["serve", "RUN", "--host", "0.0.0.0", "--port", "0", "--api-key", "k"])
    assert "warning" not in capsys.readouterr().err


def test_mistakes_are_told(capsys: Any, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert "keys cannot be read" in refusal(capsys, "RUN", "--api-key-file", str(nothing))
    nothing.touch()
    assert "contains no keys" in refusal(capsys, "RUN", "--api-key-file", str(nothing))
    assert "port" in refusal(capsys, "RUN", "--port", "70000")
    assert "is not a directory" in refusal(capsys, str(tmp_path / "none"), "--port", "0")
    assert "expected NAME=DIR" in refusal(capsys, "RUN", "--adapter", "mine")
    assert "--max-adapters: the server has no adapters" in refusal(capsys, "RUN", "--max-adapters", "4")
    unused = refusal(capsys, "RUN", "--adapter-rank", "4", "--adapter-loading")
    assert "--adapter-rank, --adapter-loading: the server has no adapters, and without one at the start" in unused
    assert "both set the size" in refusal(capsys, "RUN", "--pages", "9", "--memory-fraction", "0.5")
    assert "Two adapters have the name 'a'" in refusal(capsys, "RUN", "--adapter", "a=x", "--adapter", "a=y")
    assert "step_tokens=4 is less than" in refusal(capsys, "RUN", "--port", "0", "--step-tokens", "4")
