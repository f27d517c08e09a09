"""`stack init` writes configs that run, `stack config show` and `schema` explain them."""

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from pydoc_data.topics import topics
from typing import ClassVar

import jsonschema
import pytest
import yaml

from stack_core.cli import main
from stack_core.commands.config_schema import json_schema
from stack_train.run.config import RunConfig

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/*.yaml"))
START = Path(__file__).parents[1] / "docs" / "start.md"
KINDS = (
    "llm",
    "chat",
    "lora",
    "dpo",
    "grpo",
    "diffusion",
    "vision",
)  # in an order in which each finds the run it starts from
SMALL = {
    "llm": "--data.source text:*.txt --model.vocab_size 400 --model.layers 1 --model.embed 32 --model.heads 2 "
    "--model.mlp 32 --model.max_positions 256",
    "grpo": "--data.groups 1 --data.group_size 2 --data.seq_tokens 200 --data.environment.max_tokens 2",
    "diffusion": "--model.layers 1 --data.batch_size 8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starters")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"{number} which color is the apple? The apple is red.\n" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        for kind in KINDS:
            main(["init", kind])
        yield folder


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(RunConfig)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.slow
def test_every_starter_trains_a_step(folder):
    for kind in KINDS:
        sizes = SMALL.get(kind, "--data.batch_size 2").split()
        main(["train", f"{kind}.yaml", "--run.steps", "1", "--run.evaluate_every_steps", "0", *sizes])
        assert (folder / "runs" / kind / "config.yaml").is_file()


def test_preferences_and_tasks_are_in_the_format_of_the_chats(folder):
    """A chat model is asked through its template, so it must be aligned through it."""
    asked = {name: set() for name in ("chats", "pairs", "tasks")}
    for name, prompts in asked.items():
        for record in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()):
            (message,) = record["prompt"] if "prompt" in record else record["messages"][:1]
            prompts.add((message["role"], message["content"]))
    assert len(asked["pairs"]) >= 20 and len(asked["tasks"]) >= 10
    assert asked["pairs"] | asked["tasks"] <= asked["chats"]


def test_a_run_directory_in_place_of_a_config_is_answered_with_its_config(folder, capsys):
    (folder / "runs/old").mkdir(parents=True)
    (folder / "runs/old/config.yaml").write_text("output: runs/old")
    with pytest.raises(SystemExit):
        main(["train", "runs/old"])
    assert "`stack train runs/old/config.yaml --resume` continues the run" in capsys.readouterr().err


def test_nothing_is_overwritten(folder, capsys):
    with pytest.raises(SystemExit) as left:
        main(["init", "llm"])
    assert left.value.code == 2
    assert "llm.yaml exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_accepts_the_starters(kind, folder, validator):
    validator.validate(yaml.safe_load((folder / f"{kind}.yaml").read_text()))


def test_the_schema_accepts_examples_and_refuses_unknown_keys(validator):
    for path in EXAMPLES:
        validator.validate({"model": {"name": "llama"}, **yaml.safe_load(path.read_text())})
    base = {"output": "x", "model": {"name": "llama"}}
    for wrong in (
        {"run": {"stepz": 1}},
        {"model": {"name": "lama"}},
        {"optimizer": {"name": "sgd", "beta2": 0.1}},
        {"rnu": {}},
    ):
        assert not validator.is_valid({**base, **wrong}), wrong
    run = validator.schema["$defs"]["stack_train.run.config.RunSettings"]["properties"]
    assert run["steps"]["description"] == "total number of optimizer updates."
    assert (run["steps"]["default"], run["steps"]["type"]) == (1000, "integer")


def test_show_names_the_origin_of_each_value(folder, capsys):
    main(["config", "show", "llm.yaml", "--run.steps", "7", "--objective", "causal_lm"])
    shown = capsys.readouterr().out
    lines = {line.split("  #")[0].strip(): line.rpartition("# ")[2] for line in shown.splitlines()}
    assert lines["steps: 7"] == lines["name: causal_lm"] == "command line"
    text = (folder / "llm.yaml").read_text().splitlines()
    assert lines["layers: 4"] == f"llm.yaml:{1 + text.index('  layers: 4')}"
    assert lines["z_loss: 0.0"] == lines["beta1: 0.9"] == "default"
    resolved = yaml.safe_load(shown)
    assert (resolved["run"]["steps"], resolved["model"]["embed"]) == (7, 256)
    main(["config", "show", "llm.yaml", "--changed"])
    changed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load((folder / "llm.yaml").read_text())
    assert {name: set(section) for name, section in changed.items() if name != "output"} == {
        name: set(section) for name, section in written.items() if name != "output"
    }


def test_the_schema_is_written_for_an_editor(folder, capsys):
    main(["config", "schema", "--out", "run.schema.json"])
    assert "yaml-language-server: $schema=run.schema.json" in capsys.readouterr().out
    assert json.loads((folder / "run.schema.json").read_text())["$ref"].endswith("RunConfig")


def test_the_help_of_train_lists_the_keys_to_know_first(capsys):
    main(["train", "--help"])
    assert "optimizer.learning_rate: peak of the schedule" in " ".join(capsys.readouterr().out.split())


class Starting(BaseHTTPRequestHandler):
    """A server that is ready at the third request."""

    answered: ClassVar[list[int]] = []

    def do_GET(self):
        self.answered.append(200 if len(self.answered) == 2 else 503)
        self.send_response(self.answered[-1])
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_command_that_waits_for_the_server_waits_until_it_is_ready():
    """With --output /dev/null, curl 7.88 ends with an error instead of trying again."""
    (line,) = re.findall(r"^ {4}(curl .*)$", START.read_text(), re.MULTILINE)
    with HTTPServer(("127.0.0.1", 0), Starting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = shlex.split(line.replace("8000", str(server.server_port)), comments=True)
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        server.shutdown()
    assert (status, Starting.answered) == (0, [503, 503, 200])


@pytest.mark.slow
def test_eight_commands_lead_from_texts_to_a_served_chat_model(tmp_path):
    """The commands of docs/start.md, except the installation, in an empty directory with texts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    lines = re.findall(r"^ {4}((?:pip|stack) .*)$", START.read_text().replace("8000", port), re.MULTILINE)
    _, *commands, serve, chat = [shlex.split(line, comments=True) for line in lines]
    assert len(lines) == 8
    (tmp_path / "texts").mkdir()
    for name, text in topics.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    place = {"cwd": tmp_path, "env": {**os.environ, "PATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}}

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        subprocess.run(command, check=True, **place)
    with subprocess.Popen([*serve[:-1], "--json"], stdout=subprocess.PIPE, **place) as server:
        try:
            assert server.stdout.readline(), "the server is not ready"
            asked = "Which color is the apple?\n"
            answer = subprocess.run(chat, input=asked, stdout=subprocess.PIPE, text=True, check=True, **place).stdout
        finally:
            server.terminate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.strip().startswith("The apple is")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15 * 60  # of two cores
