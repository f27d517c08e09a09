import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stack_core.cli import main


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


def test_a_bundle_tells_what_it_computes(digits: Path, capsys: Any) -> None:
    main(["bundle", "inspect", str(digits)])
    out = capsys.readouterr().out
    assert "predict(pixels: float32[batch, 64]) -> (probabilities: float32[batch, 10])" in out
    assert "licence Apache-2.0" in out and "parameters: 4, examples: 1, custom calls: none" in out
    main(["bundle", "inspect", str(digits), "--json"])
    assert json.loads(capsys.readouterr().out)["format"] == 1


def test_a_whole_bundle_is_verified_and_a_damaged_one_refused(digits: Path, tmp_path: Path, capsys: Any) -> None:
    main(["bundle", "verify", str(digits)])
    assert "5 files have their digests; examples repeated: 1" in capsys.readouterr().out
    shutil.copytree(digits, tmp_path / "bad")
    program = next((tmp_path / "bad/programs").iterdir())
    program.write_bytes(program.read_bytes()[:-1])
    assert program.name in refusal(capsys, "bundle", "verify", str(tmp_path / "bad"))


def test_what_a_repository_does_not_have_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert "either a model, or --repository" in refusal(capsys, "serve")
    assert "either a model, or --repository" in refusal(capsys, "serve", "RUN", "--repository", str(tmp_path))
    serve = ("serve", "--repository", str(tmp_path))
    assert "--max-sequences: for language models only" in refusal(capsys, *serve, "--max-sequences", "3")
    assert "is no directory" in refusal(capsys, "serve", "--repository", str(tmp_path / "none"))
