"""A tiny pretrained model in a folder, as transformers and sentence-transformers write them."""

import json
from pathlib import Path

import pytest
import torch

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", ".", ",")


def write_model(folder: Path, pooling: str | None = "mean", seed: int = 0) -> Path:
    """A BERT with two layers of 16 and the vocabulary ``WORDS``. pooling: of sentence-transformers; None for none."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    if pooling is not None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    return folder
