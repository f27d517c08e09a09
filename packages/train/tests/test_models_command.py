import json

from stack_core.abi.plugins import registries
from stack_core.cli import main


def test_families_are_listed_with_lines_sizes_and_what_is_tested(capsys, monkeypatch):
    main(["models", "--json"])
    rows = {row["family"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(registries.models.names())
    assert rows["olmo2"] == {
        "family": "olmo2",
        "architecture": "Olmo2ForCausalLM",
        "lines": rows["olmo2"]["lines"],
        "sizes": ["1B", "7B", "13B", "32B"],
        "tested": ["logits", "greedy", "conversion", "pages"],
    }
    assert 30 < rows["olmo2"]["lines"] < rows["deepseek_v3"]["lines"] < 220
    assert rows["bert"]["architecture"] == "BertModel" and "embeddings" in rows["bert"]["tested"]
    assert (rows["dit"]["architecture"], rows["dit"]["tested"]) == (None, [])
    for columns in ("40", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        main(["models"])
        words = capsys.readouterr().out.split()
        assert {"Qwen3NextForCausalLM", "DeepseekV3ForCausalLM", "autoencoder_kl"} <= set(words)
