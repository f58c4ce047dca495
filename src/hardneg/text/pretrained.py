"""Pretrained text encoders of ``transformers`` and ``sentence-transformers``, from a folder or the hub.

A ``sentence-transformers`` folder names the Python classes of its modules. They are not imported: its pooling is read
from its settings, so that a folder from elsewhere runs no code.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.extras import required
from hardneg.text.tokens import PretrainedTokenizer, Tokens

POOLINGS = ("cls", "mean")
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers; losses normalize by themselves
SAFE = {"trust_remote_code": False}


class PretrainedEncoder(nn.Module):
    """A pretrained transformer whose token states are pooled to one vector.

    Args:
        name: a folder, or the name of a model of the Hugging Face hub
        pooling: ``"cls"``, the state of the first token; ``"mean"``, over all tokens; None for the one that a
            ``sentence-transformers`` model was trained with
        max_length: tokens of a text that are used, at most; None for as many as the model takes
        dropout: in all layers, instead of the model's own

    The weights are read from safetensors only, and no code of the model is run.
    """

    def __init__(
        self, name: str, pooling: str | None = None, max_length: int | None = None, dropout: float | None = None
    ) -> None:
        super().__init__()
        transformers, source = required("transformers", "text"), located(name)
        self.pooling = _own_pooling(source) if pooling is None else pooling
        checks.choice("encoder.pooling", self.pooling, POOLINGS)
        try:
            config = transformers.AutoConfig.from_pretrained(source, **SAFE)
            for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
                if dropout is not None and hasattr(config, key):
                    setattr(config, key, checks.number("dropout", dropout, at_least=0, below=1))
            transformers.utils.logging.disable_progress_bar()  # it shows the reading of a local file
            if torch.get_default_device().type == "meta":  # only the names and shapes of the weights are wanted
                self.model = transformers.AutoModel.from_config(config, **SAFE)
            else:
                stored = transformers.AutoModel.from_pretrained(source, config=config, use_safetensors=True, **SAFE)
                self.model = stored.float()  # weights stored in half precision lose small updates
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(name, error) from error
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"encoder.name={name!r} has an encoder and a decoder: give a model with an encoder only")
        self.model.pooler = None  # a head of BERT's that is not used, so that its weights would get no gradient
        self.features = int(config.hidden_size)
        tokenizer = load_tokenizer(name)
        limit = _limit(source, config, tokenizer)
        self.tokenizer = PretrainedTokenizer(tokenizer, limit if max_length is None else min(max_length, limit))

    def forward(self, tokens: Tokens) -> Tensor:
        """Features (B, d) of a batch."""
        states: Tensor = self.model(input_ids=tokens.ids, attention_mask=tokens.mask.long()).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        weight = tokens.mask.unsqueeze(2).to(states.dtype)  # (B, L, 1)
        return (states * weight).sum(dim=1) / weight.sum(dim=1)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model, tokenizer and pooling to a folder, for ``SentenceTransformer(folder)``."""
        path = Path(folder)
        self.model.save_pretrained(path)
        self.tokenizer.tokenizer.save_pretrained(path)
        (path / "1_Pooling").mkdir(exist_ok=True)
        modes = {"pooling_mode_cls_token": self.pooling == "cls", "pooling_mode_mean_tokens": self.pooling == "mean"}
        kinds = (("", "Transformer"), ("1_Pooling", "Pooling"))
        contents: dict[str, Any] = {
            "modules.json": [
                {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
                for number, (place, kind) in enumerate(kinds)
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": self.features, **modes},
            "sentence_bert_config.json": {"max_seq_length": self.tokenizer.max_length, "do_lower_case": False},
        }
        for name, content in contents.items():
            (path / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def load_tokenizer(name: str) -> Any:
    """The tokenizer of ``transformers`` in a folder or of a model of the hub."""
    try:
        return required("transformers", "text").AutoTokenizer.from_pretrained(located(name), use_fast=True, **SAFE)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(name, error) from error


def is_folder(name: str) -> bool:
    """Whether the name of a model is a folder, not a name of the hub."""
    return Path(name).expanduser().is_dir()


def located(name: str) -> str:
    """The folder as a path, or the name of a model of the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.count("/") > 1 or name.startswith((".", "~", "/")):
            raise ValueError(f"encoder.name={name!r} is not a folder of a model: check the path")
        return name
    if not (folder / "config.json").is_file():
        raise ValueError(f"encoder.name={name!r} has no config.json: give the folder of a transformers model")
    return str(folder)


def _unreadable(name: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(
        f"encoder.name={name!r} is neither gru nor transformer, and cannot be loaded as a pretrained model ({reason}): "
        "give its folder, or its name on the hub"
    )


def _settings(source: str, file: str) -> dict[str, Any] | list[Any]:
    """A JSON file of a model folder; empty if there is none."""
    path = Path(source) / file
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): download the model again") from error
    return found if isinstance(found, dict | list) else {}


def _own_pooling(source: str) -> str:
    """The pooling that a sentence-transformers folder was trained with."""
    modules = [each for each in _settings(source, "modules.json") if isinstance(each, dict)]
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    if unknown := [kind for kind in kinds if kind not in MODULES]:
        raise ValueError(
            f"encoder.name={source!r} has a module {unknown[0]}, which is not supported: pass the SentenceTransformer "
            "as encoder= in Python"
        )
    place = next((str(each.get("path")) for each in modules if str(each.get("type", "")).endswith(".Pooling")), "")
    pooling = _settings(source, f"{Path(place).name}/config.json") if place else {}
    assert isinstance(pooling, dict)
    if pooling.get("pooling_mode_mean_tokens") or pooling.get("pooling_mode") == "mean":
        return "mean"
    if pooling.get("pooling_mode_cls_token") or pooling.get("pooling_mode") == "cls":
        return "cls"
    raise ValueError(f"encoder.name={source!r} does not say how to pool tokens: set encoder.pooling=cls or mean")


def _limit(source: str, config: Any, tokenizer: Any) -> int:
    """Tokens of a text that the model takes."""
    own = _settings(source, "sentence_bert_config.json")
    positions = getattr(config, "max_position_embeddings", None) or 512
    if positions > tokenizer.model_max_length:
        positions = tokenizer.model_max_length
    elif getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= 2  # they number positions from the padding id on
    declared = own.get("max_seq_length") if isinstance(own, dict) else None
    return min(int(positions), declared) if isinstance(declared, int) and declared > 0 else int(positions)
