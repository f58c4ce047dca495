"""Embeddings of texts by a model, kept on disk by content, prompt and the model's weights."""

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hardneg.mining import tasks
from hardneg.mining.files import replaced
from hardneg.mining.vectors import NpyFile, Shards, Vectors

_CHUNK = 8192  # texts per call of the model, and per file of the cache
# Of models of sentence-transformers, beside the weights.
_SETTINGS = ("prompts", "default_prompt_name", "truncate_dim", "max_seq_length", "max_length")
_SENTENCE_TRANSFORMERS = {"queries": "encode_query", "corpus": "encode_document"}


def embed(
    name: str, texts: Sequence[str], model: object, prompt: str | None, cache: Path | None, engine: str = "local"
) -> Vectors:
    """Embeddings (N, d) of texts. name: "queries" or "corpus" · cache: a folder, or None to keep them in memory"""
    chunks = [texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK)]
    shared, title = (name, model, prompt), f"embedding the {name}"
    _encoder(*shared)  # raises if the model is none
    encoded = _encoded_by_worker if engine == "ray" else _encoded
    if cache is None:
        parts = dict(tasks.run(engine, encoded, shared, chunks, title))
        return Vectors(name, np.concatenate([parts[number] for number in range(len(chunks))]))
    key = hashlib.blake2b(weights_key(model).encode() + repr((name, prompt)).encode(), digest_size=20).hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    paths = [cache / f"{_content_key(key, some)}.npy" for some in chunks]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    for place, rows in tasks.run(engine, encoded, shared, [chunks[number] for number in missing], title):
        content = io.BytesIO()  # what numpy writes to a file itself fails on a full disk without naming it
        np.save(content, rows, allow_pickle=False)
        with replaced(paths[missing[place]]) as out:
            out.write(content.getbuffer())
    files = [NpyFile(path) for path in paths]
    for file, some in zip(files, chunks, strict=True):
        if len(file) != len(some):
            raise ValueError(f"{file.path} has {len(file)} rows instead of {len(some)}: remove it from the cache")
    return Shards(name, files)


def _encoded(shared: tuple[str, object, str | None], texts: Sequence[str]) -> NDArray[np.float32]:
    """One task: the embeddings of a chunk."""
    return _encoder(*shared)(texts)


def _encoded_by_worker(shared: tuple[str, object, str | None], texts: Sequence[str]) -> NDArray[np.float32]:
    """As `_encoded`; a SentenceTransformer goes to the GPU of the worker, if it has one."""
    name, model, prompt = shared
    if hasattr(model, "encode") and isinstance(model, nn.Module) and torch.cuda.is_available():
        model = model.to("cuda")
    return _encoded((name, model, prompt), texts)


def _encoder(name: str, model: object, prompt: str | None) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    """A function of texts that returns float32 embeddings."""
    method = getattr(model, _SENTENCE_TRANSFORMERS[name], None) or getattr(model, "encode", None)
    if method is None and not callable(model):
        raise ValueError(f"model must be a SentenceTransformer or a function of a list of texts, got {model!r}")

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        if method is not None:
            given = {} if prompt is None else {"prompt": prompt}
            rows = method(list(texts), convert_to_numpy=True, show_progress_bar=False, **given)
        else:
            with torch.no_grad():
                rows = model([(prompt or "") + text for text in texts])  # type: ignore[operator]
        rows = rows.detach().float().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
        if rows.ndim != 2 or len(rows) != len(texts) or rows.dtype.kind != "f":
            raise ValueError(
                f"model must return a row of floats for each of {len(texts)} texts, got {rows.dtype} {rows.shape}"
            )
        return np.ascontiguousarray(rows, np.float32)

    return encode


def weights_key(model: object) -> str:
    """A hash of a model's structure, weights and settings, which changes when it is trained further."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise ValueError(
            "cache= recognizes a model by its weights, which a plain function has not: "
            "pass a torch.nn.Module or a SentenceTransformer, or leave out cache="
        )
    settings = [getattr(owner, name, None) for name in _SETTINGS]
    found = hashlib.blake2b(repr((owner, settings, getattr(model, "__name__", ""))).encode())
    for name, weight in owner.state_dict().items():
        if isinstance(weight, Tensor):
            found.update(repr((name, weight.dtype, tuple(weight.shape))).encode())
            found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _content_key(key: str, texts: Sequence[str]) -> str:
    found = hashlib.blake2b(key.encode(), digest_size=20)
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        found.update(len(encoded).to_bytes(8, "little") + encoded)
    return found.hexdigest()


def checked_prompts(given: Any) -> dict[str, str]:
    """Prompts by "queries" and "corpus"."""
    prompts = {} if given is None else given
    if not isinstance(prompts, dict) or not {*prompts} <= {"queries", "corpus"}:
        raise ValueError(f'prompts must be a dict with "queries" and "corpus", got {given!r}')
    return prompts
