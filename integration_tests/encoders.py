"""A tiny BERT with random weights, in a directory of sentence-transformers."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

__all__ = ["write_encoder"]

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "##er", "##ish", "sea", "the", "is", ".", "e")
EMBED, MLP, LAYERS, POSITIONS = 20, 28, 2, 24


def write_encoder(directory: Path, *, pooling: str, normalize: bool, max_tokens: int) -> None:
    directory.mkdir()
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (EMBED,), "pooler.dense": (EMBED, EMBED)}
    for layer in range(LAYERS):
        parts = {f"attention.self.{name}": (EMBED, EMBED) for name in ("query", "key", "value")}
        parts |= {"attention.output.dense": (EMBED, EMBED), "attention.output.LayerNorm": (EMBED,)}
        parts |= {"intermediate.dense": (MLP, EMBED), "output.dense": (EMBED, MLP), "output.LayerNorm": (EMBED,)}
        shapes |= {f"encoder.layer.{layer}.{name}": shape for name, shape in parts.items()}
    tensors = {f"{name}.weight": rng.normal(size=shape) * 0.4 for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": rng.normal(size=shape[:1]) * 0.4 for name, shape in shapes.items()}
    rows = {"word": len(WORDS), "position": POSITIONS, "token_type": 2}
    tensors |= {f"embeddings.{name}_embeddings.weight": rng.normal(size=(count, EMBED)) for name, count in rows.items()}
    save_file({name: each.astype(np.float32) for name, each in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(kinds)
    ]
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")}
    files = {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": EMBED, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "tokenizer_config.json": {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    special = [(name, WORDS.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.save(str(directory / "tokenizer.json"))
