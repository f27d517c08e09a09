import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import pytest

from stack_core.cli import main
from stack_serve import bundle


def refusal(capsys: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_bundles_below_a_directory_are_listed_and_damaged_ones_named(digits: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("good", "bad"):
        shutil.copytree(digits, tmp_path / name / "1")
    (tmp_path / "bad/1/manifest.json").write_text("{}")
    main(["bundle", "ls", str(tmp_path)])
    bad, good = capsys.readouterr().out.splitlines()
    assert good.startswith(f"{tmp_path}/good/1  digits  predict  ") and "is damaged" in bad
    main(["bundle", "ls", str(tmp_path), "--json"])
    bad, good = json.loads(capsys.readouterr().out)
    assert good["signatures"] == ["predict"] and good["bytes"] > 10_000 and "manifest.json" in bad["problem"]
    (tmp_path / "empty").mkdir()
    main(["bundle", "ls", str(tmp_path / "empty")])
    assert "no bundle below" in capsys.readouterr().err
    assert "none is not a directory" in refusal(capsys, "bundle", "ls", str(tmp_path / "none"))


def test_a_bundle_tells_what_it_computes(digits: Path, capsys: Any) -> None:
    main(["bundle", "inspect", str(digits)])
    out = capsys.readouterr().out
    assert "predict(pixels: float32[batch, 64]) -> (probabilities: float32[batch, 10])" in out
    assert "licence Apache-2.0" in out and "parameters: 4, examples: 1, custom calls: none" in out
    main(["bundle", "inspect", str(digits), "--json"])
    assert json.loads(capsys.readouterr().out)["format"] == 1


def test_a_whole_bundle_is_verified_and_a_damaged_one_refused(digits: Path, tmp_path: Path, capsys: Any) -> None:
    main(["bundle", "verify", str(digits)])
    assert "5 files match their digests; examples replayed: 1" in capsys.readouterr().out
    shutil.copytree(digits, tmp_path / "bad")
    program = next((tmp_path / "bad/programs").iterdir())
    program.write_bytes(program.read_bytes()[:-1])
    assert program.name in refusal(capsys, "bundle", "verify", str(tmp_path / "bad"))


def test_a_server_ends_in_time_whatever_still_computes(tmp_path: Path) -> None:
    def count(params: Any, limit: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, limit[0], lambda i, x: jnp.tanh(x @ x), jnp.eye(64))

    function = bundle.Function(count, {"limit": ("int32", (1,))})
    bundle.export(tmp_path / "models/count", {"predict": function}, licence="MIT")
    command = [sys.executable, "-m", "stack_core", "serve", "--repository", str(tmp_path / "models")]
    options = ["--port", "0", "--json", "--drain-s", "1", "--max-json-bytes", "1000"]
    answers: list[int] = []

    def ask() -> None:
        tensor = {"name": "limit", "datatype": "INT32", "shape": [1], "data": [2**31 - 1]}
        answers.append(
            httpx2.post(f"{address}/v2/models/count/infer", json={"inputs": [tensor]}, timeout=60).status_code
        )

    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["address"]
            thread = threading.Thread(target=ask)
            thread.start()
            time.sleep(1.0)
            assert not answers
            server.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert server.wait(60) == 0
            took_s = time.monotonic() - began_s
        finally:
            server.kill()
    thread.join(60)
    assert answers == [503] and 0.5 < took_s < 8


def test_what_a_repository_does_not_have_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert "either a model, or --repository" in refusal(capsys, "serve")
    assert "either a model, or --repository" in refusal(capsys, "serve", "RUN", "--repository", str(tmp_path))
    serve = ("serve", "--repository", str(tmp_path))
    assert "--max-sequences: for language models only" in refusal(capsys, *serve, "--max-sequences", "3")
    assert "is not a directory" in refusal(capsys, "serve", "--repository", str(tmp_path / "none"))
