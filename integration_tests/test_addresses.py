"""Addresses of models on the command line: paths with `..`, remote storage, names on the hub, absent devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main

MODEL = {"name": "llama", "vocab_size": 280, "layers": 1, "embed": 16, "heads": 2, "mlp": 24}
LORA = {"rules": {"path": "query/kernel", "rank": 2}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with work/, in which commands run, and what they need; base/ is a run beside it."""
    root = tmp_path_factory.mktemp("addresses")
    (root / "work").mkdir()
    (root / "text.txt").write_text("one two three four five six seven " * 40)
    data = {"source": "text:../text.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    base = {"model": MODEL, "data": data, "run": {"steps": 1}, "output": "../base"}
    (root / "work" / "base.yaml").write_text(yaml.safe_dump(base))
    tuned = {"data": data, "run": {"steps": 1, "init_from": "run:../base"}, "lora": LORA, "output": "../tuned"}
    (root / "work" / "tuned.yaml").write_text(yaml.safe_dump(tuned))
    return root


@pytest.fixture
def work(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root / "work")
    return root / "work"


def test_paths_with_two_dots_lead_where_they_say(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "base.yaml"])
    main(["train", "tuned.yaml"])
    main(["convert", "../base", "hf:../published"])
    # A published checkpoint is the start of adapters; their base is read from it again.
    main(["train", "tuned.yaml", "--run.init_from", "hf:../published", "--output", "../straight"])
    capsys.readouterr()
    main(["generate", "../straight", "--prompt", "one", "--max-tokens", "2", "--json"])
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]) == 2
    assert open_for_generation("../base").adapters_at("../tuned")  # as `stack serve --adapter m=../tuned`
    assert sorted(path.name for path in work.iterdir()) == ["base.yaml", "tuned.yaml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "base.yaml", "--output", "hdfs://bucket/run"),
        ("train", "base.yaml", "--run.init_from", "abfs://bucket/run"),
        ("train", "base.yaml", "--run.init_from", "hf:s3://bucket/run"),
        ("train", "base.yaml", "--data.source", "text:s3://bucket/*.txt"),
        ("train", "gs://bucket/run.yaml"),
        ("compile", "base.yaml", "--target", "h100:1x1x1", "--output", "az://bucket/run"),
        ("generate", "gs://bucket/run", "--prompt", "one"),
        ("convert", "hf:gs://bucket/model", "../run"),
        ("convert", "../base", "hf:s3://bucket/model"),
        ("quantize", "../base", "--recipe", "w8a8", "--out", "gs://bucket/run"),
        ("export", "../base", "s3://bucket/bundle", "--licence", "MIT"),
        ("serve", "gs://bucket/run", "--port", "0"),
        ("serve", "--repository", "s3://bucket/models", "--port", "0"),
        ("sample", "gs://bucket/run"),
        ("chat", "gs://bucket/run"),
    ],
    ids=" ".join,
)
def test_remote_storage_is_refused_before_a_folder_of_its_name_is_made(
    work: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    told = capsys.readouterr().err
    assert "address of remote storage" in told and "Use a local path" in told
    assert not [path for path in work.iterdir() if ":" in path.name]


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hf:HuggingFaceTB/SmolLM2-135M", "--prompt", "one"),
        ("generate", "HuggingFaceTB/SmolLM2-135M", "--prompt", "one"),
        ("serve", "HuggingFaceTB/SmolLM2-135M", "--port", "0"),
        ("convert", "hf:HuggingFaceTB/SmolLM2-135M", "../run"),
        ("sample", "hf:HuggingFaceTB/SmolLM2-135M"),
        ("train", "base.yaml", "--run.init_from", "hf:HuggingFaceTB/SmolLM2-135M", "--output", "../other"),
        ("train", "base.yaml", "--run.init_from", "HuggingFaceTB/SmolLM2-135M", "--output", "../other"),
        ("train", "base.yaml", "--data.tokenizer", "HuggingFaceTB/SmolLM2-135M", "--output", "../other"),
    ],
    ids=" ".join,
)
def test_a_name_on_the_hub_gets_the_command_that_fetches_it(
    work: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`" in capsys.readouterr().err


def test_a_platform_that_is_not_here_is_an_error_of_every_command(work: Path) -> None:
    if not (work.parent / "base").exists():
        main(["train", "base.yaml"])
    (work.parent / "fn.py").write_text("import jax.numpy as jnp\n\ndef fn():\n    return jnp.ones(3) * 2\n")
    commands = [
        "train base.yaml --output ../other",
        "generate ../base --prompt one",
        "serve ../base --port 0",
        "quantize ../base --recipe w8a8 --out ../quantized",
        "convert ../base hf:../converted",
        "export ../base ../bundle --licence MIT",
        "chat ../base",
        "bench ops --ops norm",
        "bench burn-in",
        "tune ../fn.py:fn",
        "profile costs ../fn.py:fn",
    ]
    code = (
        "import sys\nfrom stack_core.cli import main\nfor line in sys.argv[1:]:\n"
        "    try:\n        main(line.split())\n    except SystemExit as error:\n        print(line, error.code)\n"
    )
    environ = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(" 2")] == [f"{line} 2" for line in commands]
    assert done.stderr.count("JAX_PLATFORMS") >= len(commands)
    assert "Traceback" not in done.stderr
