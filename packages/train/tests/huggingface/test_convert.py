import json

import pytest

from stack_core.cli import main


def test_there_and_back(make_checkpoint, tmp_path, capsys):
    source, tensors = make_checkpoint(dtype="BF16")
    main(["convert", f"hf:{source}", str(tmp_path / "run")])
    assert "parameters in bfloat16" in capsys.readouterr().out
    main(["convert", str(tmp_path / "run"), f"hf:{tmp_path / 'back'}", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == sum(tensor.size for tensor in tensors.values())
    assert result["destination"] == str(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("run", "other", "one of the two is a run directory"),
        ("hf:a", "hf:b", "one of the two is a run directory"),
        ("hg:a", "run", "Unknown model format 'hg' in 'hg:a'. Known: gguf, hf, peft"),
        ("hf:nothing", "run", "nothing is not a directory. Give the directory of a Hugging Face checkpoint"),
        ("nothing", "hf:back", "holds no run"),
    ],
)
def test_what_cannot_be_converted_exits_with_status_2(tmp_path, monkeypatch, capsys, source, destination, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["convert", source, destination])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
