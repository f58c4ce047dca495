"""Mining into a file: what is finished is kept in a folder beside it, so that the same call continues after a crash."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hardneg
from hardneg.mining.blocks import Job
from hardneg.mining.embedding import embed, weights_key
from hardneg.mining.engines import run_blocks
from hardneg.mining.files import replaced
from hardneg.mining.index import read_index
from hardneg.mining.negatives import check_texts, finish, make_job
from hardneg.mining.not_negatives import checked_pairs
from hardneg.mining.result import Mined
from hardneg.mining.rules import Rules
from hardneg.mining.vectors import NpyFile, ParquetFile, Shards, Vectors, open_vectors

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Input:
    """Queries, corpus and positives of a command: texts with a model, or files of embeddings without one."""

    queries: Any
    corpus: Any
    positives: Any
    model: Any = None
    prompts: dict[str, str] | None = None
    guide: Any = None
    cache: Path | None = None
    not_negatives: Path | None = None
    index: Path | None = None  # a file of faiss


def work_folder(target: Path) -> Path:
    """The folder of unfinished work for an output file."""
    return target.with_name(f".{target.name}.unfinished")


def mine_to(target: Path, given: Input, rules: Rules, memory: int, engine: str) -> Mined:
    """Mine, and keep finished embeddings and blocks beside ``target`` until `discard` is called.

    Blocks of other inputs or settings are removed. A failure before anything is finished leaves no folder.
    """
    folder = work_folder(target)
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, and nothing is written elsewhere: remove it")
    if given.model is not None:
        check_texts((given.queries, given.corpus), given.positives, rules)
    pairs = checked_pairs(given.not_negatives, given.queries, given.corpus)
    existed = folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        vectors, texts = _embedded(given, given.cache or folder / "embeddings", engine)
        index = None if given.index is None else read_index(given.index)
        job = make_job(*vectors, given.positives, texts, rules, memory, given.guide, pairs, index)
        _keep_or_clear(folder, _settings(job, given))
        blocks = run_blocks(job, engine, folder)
    except BaseException:
        if not existed and not any(folder.rglob("*.np[yz]")):
            shutil.rmtree(folder)  # nothing is finished
        raise
    return finish(job, blocks, texts)


def discard(target: Path) -> None:
    """Remove the folder of unfinished work."""
    shutil.rmtree(work_folder(target), ignore_errors=True)


def _embedded(
    given: Input, cache: Path, engine: str
) -> tuple[tuple[Vectors, Vectors], tuple[Sequence[str], Sequence[str]] | None]:
    if given.model is None:
        return (open_vectors("queries", given.queries), open_vectors("corpus", given.corpus)), None
    prompts = given.prompts or {}
    queries = embed("queries", given.queries, given.model, prompts.get("queries"), cache, engine)
    corpus = embed("corpus", given.corpus, given.model, prompts.get("corpus"), cache, engine)
    return (queries, corpus), (given.queries, given.corpus)


def _settings(job: Job, given: Input) -> dict[str, Any]:
    """What finished blocks depend on."""
    lists = {"positives": job.positives, "not_negatives": job.not_negatives}
    hashes = {
        name: hashlib.blake2b(some.offsets.tobytes() + some.items.tobytes()).hexdigest() for name, some in lists.items()
    }
    return {
        "hardneg": hardneg.__version__,
        "rules": repr(job.rules),
        "guide": None if given.guide is None else weights_key(given.guide),
        "index": None if given.index is None else _state(given.index),
        "memory": job.memory,
        "device": job.device,
        **hashes,
        "queries": _identity(job.queries),
        "corpus": _identity(job.corpus),
    }


def _identity(vectors: Vectors) -> list[Any]:
    """Name, size and, unless the name tells the content, time of each file."""
    files = vectors.files if isinstance(vectors, Shards) else [vectors]
    found = []
    for file in files:
        if not isinstance(file, NpyFile | ParquetFile):
            raise ValueError(f"{file.name} is not in a file: give a path")
        # Files of the cache are named by their content, and are the same when they are written again.
        named = file.path.stem.isalnum() and len(file.path.stem) == 40
        found.append(_state(file.path)[: 2 if named else 3])
    return found


def _state(path: Path) -> list[Any]:
    """Name, size and time of a file."""
    state = path.stat()
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]


def _keep_or_clear(folder: Path, settings: dict[str, Any]) -> None:
    """Keep the finished blocks if they belong to these settings, else remove them."""
    file = folder / _SETTINGS
    content = json.dumps(settings, indent=1) + "\n"
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") == content:
        return
    for block in folder.glob("block-*.npz"):
        block.unlink()
    with replaced(file) as out:
        out.write(content.encode())
