import json
from pathlib import Path

import pytest

from stack_core.cli import main

PRESETS = [
    "cispo",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "ipo",
    "kto",
    "logit_distill",
    "orpo",
    "ppo",
    "reinforce_pp",
    "reward_model",
    "rloo",
    "simpo",
]


def test_every_algorithm_is_listed_with_its_equation_and_paper(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rl", "list", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(PRESETS) <= set(found)
    for name in PRESETS:
        assert "l = " in found[name]["equation"], name
        assert "arXiv:" in found[name]["source"], name
    once = {"epochs": 1, "minibatches": 1}
    assert found["dr_grpo"]["parts"] == {"advantage": "centred", "loss_aggregation": "constant", **once}
    several = {"epochs": 3, "minibatches": 4}
    assert found["ppo"]["parts"] == {"advantage": "gae", "loss_aggregation": "token", **several}
    assert found["rloo"]["parts"]["kl_in"] == "reward"
    assert found["dapo"]["parts"]["overlong"]["kind"] == "penalize"
    assert found["dpo"]["parts"] == {}


def test_the_list_is_for_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rl", "list"])
    text = capsys.readouterr().out
    assert "ipo: Identity preference optimization" in text
    assert "    l = -sg[clip(r, lowest, highest)] A log p, A = (reward - mean of the group) / std" in text
    assert "    advantage: group, loss_aggregation: token, epochs: 1, minibatches: 16\n" in text


RECIPE = """
data: {name: rollouts, environment: {name: cell}, seq_tokens: 8}
objective: {name: dr_grpo, epochs: 2, clip_high: 0.28, kl: 0.1, kl_estimator: k3, loss_aggregation: token, OTHER}
"""


def audited(path: Path, capsys: pytest.CaptureFixture[str], other: str, *options: str) -> str:
    path.write_text(RECIPE.replace("OTHER", other))
    main(["rl", "audit", str(path), *options])
    return capsys.readouterr().out


def test_an_audit_shows_where_a_recipe_leaves_its_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(audited(tmp_path / "a.yaml", capsys, "entropy: 0.0", "--json"))
    differing = {each["key"]: (each["value"], each["expected"]) for each in found["choices"]}
    differing = {key: pair for key, pair in differing.items() if pair[0] != pair[1]}
    assert differing == {
        "objective.loss_aggregation": ("token", "constant"),
        "objective.epochs": (2, 1),
        "objective.clip_high": (0.28, 0.2),
        "objective.kl": (0.1, 0.0),
        "objective.kl_estimator": ("k3", "k2"),
    }
    (warning,) = found["warnings"]
    assert "k3 has the gradient of KL(p_ref || p)" in warning


def test_an_audit_says_what_k3_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = audited(tmp_path / "a.yaml", capsys, "entropy: 0.0")
    assert "objective.clip_high: 0.28   <- dr_grpo has 0.2\n" in text
    assert "k3 has the gradient of KL(p_ref || p)" in text
    assert "k3 has" not in audited(tmp_path / "b.yaml", capsys, "kl_corrected: true")


def test_an_audit_refuses_what_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        audited(tmp_path / "a.yaml", capsys, "minibatches: 7")
    assert "7, which does not divide the 128 episodes" in capsys.readouterr().err


def test_an_audit_of_what_is_no_recipe_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("data: {name: rollouts}")
    with pytest.raises(SystemExit):
        main(["rl", "audit", str(tmp_path / "a.yaml")])
    assert "lacks objective.name" in capsys.readouterr().err
