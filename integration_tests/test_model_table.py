"""The table of models in the docs has every family with its architecture."""

from pathlib import Path

from stack_core.abi.plugins import registries

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_the_table_has_every_family() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {row[0].removeprefix("| ").strip("`"): row[1] for row in rows if len(row) == 3}
    assert listed.keys() == set(registries.models)
    for name, architecture in listed.items():
        config_map = getattr(registries.models[name], "config_map", None)
        assert architecture == getattr(config_map, "architecture", "-")
