"""`hardneg.mine`: the best negatives of a corpus for each query, by exact search or by an index of the user."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hardneg import checks
from hardneg.losses.hardening import BelowPositive, Hardening
from hardneg.mining.blocks import Block, Job
from hardneg.mining.embedding import checked_prompts, embed
from hardneg.mining.engines import run_blocks
from hardneg.mining.guide import checked_guide
from hardneg.mining.index import checked_index
from hardneg.mining.memory import checked_memory, tile_size
from hardneg.mining.not_negatives import NONE, checked_pairs, left_out
from hardneg.mining.positives import Ints, checked_positives, duplicates
from hardneg.mining.result import Mined
from hardneg.mining.rules import DUPLICATE, Rules, checked_rules
from hardneg.mining.selection import Dropped
from hardneg.mining.tasks import ENGINES
from hardneg.mining.texts import checked_texts, is_texts, places
from hardneg.mining.vectors import Vectors, open_vectors

_MOST_DOCUMENTS = (1 << 32) - 1  # an index has 32 bits while it is searched for
Texts = tuple[Sequence[str], Sequence[str]]


def mine(
    queries: Any,
    corpus: Any,
    positives: Any,
    *,
    num_negatives: int = 10,
    hardening: Hardening | tuple[Hardening, ...] = BelowPositive(relative=0.95),  # noqa: B008 (immutable)
    rank_range: tuple[int, int | None] = (0, None),
    max_score: float | None = None,
    model: Any = None,
    prompts: dict[str, str] | None = None,
    guide: Any = None,
    not_negatives: Any = None,
    cache: str | Path | None = None,
    sample: bool = False,
    seed: int = 0,
    memory: str | int = "2GiB",
    engine: str = "local",
    index: Any = None,
) -> Mined:
    """Find hard negatives in a corpus, by exact search within a memory budget.

    Args:
        queries: (Q, d) tensor, array, .npy or .parquet file, or a folder of such files; or texts.
        corpus: (N, d), as ``queries``; a corpus in files need not fit in memory.
        positives: of each query, indices (Q,) or (Q, P), −1 for none, or lists of indices; of texts also the texts.
        num_negatives: k, per query.
        hardening: rules on the cosine with t = 1: `BelowPositive` (compared with the lowest positive), `Threshold`,
            `Ring`, with ``sample`` also a tilt; a tuple applies all of them.
        rank_range: ranks to choose from; rank 0 is the best document that is neither positive, nor duplicate of
            one, nor in ``not_negatives``.
        max_score: highest cosine of a negative.
        model: for texts, a SentenceTransformer, or a function of a list of texts that returns embeddings.
        prompts: put before each text, by "queries" and "corpus".
        guide: drops candidates that it scores above the lowest positive: a cross-encoder or function of pairs of
            texts, or the embeddings (queries, corpus) of another model.
        not_negatives: pairs (query, document) that are known to be no negatives: (P, 2) row numbers, a list of pairs of
            row numbers or texts, or a file as for `read_not_negatives` with the query in ``a`` and the document in
            ``b``. If queries and corpus are the same, the order does not matter.
        cache: folder for embeddings of texts, found again by text, prompt and the model's weights.
        sample: draw from the candidates that the rules keep, by the weights of the tilt, instead of taking the best.
        seed: of the draw.
        memory: budget of the search beyond the arrays given, as "512MiB" or in bytes.
        engine: "local", or "ray" for an existing Ray cluster.
        index: an approximate index of the corpus that finds candidates instead of the exact search: one of faiss, or
            a function of unit vectors (B, d) and k that returns documents (B, k), −1 for none. ``mined.recall`` is
            the share of the best documents that it found for up to 100 queries.

    Returns:
        `Mined`: ``indices`` (Q, k), ``scores`` (Q, k), ``dropped`` by rule, ``save(path, format=…)``.

    Examples:
        >>> corpus = torch.tensor([[1.0, 0.0], [0.99, 0.14], [0.7, 0.7], [0.0, 1.0]])
        >>> mined = mine(corpus[:1], corpus, [0], num_negatives=2)
        >>> mined.indices, mined.dropped
        (tensor([[2, 3]]), {'BelowPositive': 1})
    """
    rules = checked_rules(num_negatives, hardening, rank_range, max_score, sample, seed)
    budget = checked_memory(memory)
    checks.choice("engine", engine, ENGINES)
    refuse_index(engine, index)
    pairs = checked_pairs(not_negatives, queries, corpus)  # before texts are embedded
    query_vectors, corpus_vectors, texts = _vectors(queries, corpus, positives, rules, model, prompts, cache, engine)
    job = make_job(query_vectors, corpus_vectors, positives, texts, rules, budget, guide, pairs, index)
    return finish(job, run_blocks(job, engine), texts)


def refuse_index(engine: str, index: object) -> None:
    """Raise if an index is given that the engine does not search."""
    if index is not None and engine != "local":
        raise ValueError(f'index= is searched in this process: use engine="local", got engine={engine!r}')


def make_job(
    queries: Vectors,
    corpus: Vectors,
    positives: Any,
    texts: Texts | None,
    rules: Rules,
    memory: int,
    guide: Any = None,
    pairs: Ints = NONE,
    index: Any = None,
) -> Job:
    """Check the inputs together, and find the duplicates of positives. pairs: (2, P) that are no negatives"""
    if queries.shape[1] != corpus.shape[1]:
        raise ValueError(
            f"queries have d = {queries.shape[1]}, but the corpus {corpus.shape[1]}: take both from one encoder"
        )
    if len(corpus) > _MOST_DOCUMENTS:
        raise ValueError(f"the corpus has {len(corpus)} rows, more than {_MOST_DOCUMENTS}: mine it in parts")
    where = None if texts is None else places(texts[1])
    lists = checked_positives(positives, len(queries), len(corpus), where)
    filter_guide = checked_guide(guide, texts, len(queries), len(corpus))
    if (rules.needs_positive or filter_guide is not None) and not lists.sizes.all():
        rule = "guide" if filter_guide is not None else "BelowPositive"
        raise ValueError(
            f"query {int((lists.sizes == 0).argmax())} has no positives, with which {rule} compares: "
            "leave it out, or use hardening=hn.Uniform()"
        )
    same = duplicates(lists, corpus, tile_size(memory, corpus.shape[1]), where)
    others = left_out(pairs, lists, same, len(corpus))
    _check_number(rules, len(corpus) - int((lists.sizes + same.sizes + others.sizes).min()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found_by = None if index is None else checked_index(index, corpus, memory)
    return Job(queries, corpus, lists, same, rules, memory, others, filter_guide, device, found_by)


def finish(job: Job, blocks: Sequence[Block], texts: Texts | None) -> Mined:
    """The blocks as one result; warns if queries have too few negatives."""
    names = job.rules.names
    counts = torch.stack([block.counts for block in blocks]).sum(dim=0).tolist()
    dropped = {DUPLICATE: len(job.duplicates.items)} | dict(zip(names, counts, strict=True))
    mined = Mined(
        torch.cat([block.indices for block in blocks]),
        torch.cat([block.scores for block in blocks]),
        {name: number for name, number in dropped.items() if number},
        job.positives,
        torch.cat([block.positive_scores for block in blocks]),
        names,
        Dropped.joined([block.dropped for block in blocks]),
        texts,
        job.recall(),
    )
    if len(mined.short):
        warnings.warn(
            f"{len(mined.short)} of {len(mined)} queries have fewer than {job.rules.num_negatives} negatives: "
            "see mined.short and mined.dropped_of(query); relax the rules, or train on those that have enough",
            stacklevel=3,
        )
    return mined


def check_texts(texts: Texts, positives: Any, rules: Rules) -> None:
    """Raise, before texts are embedded, if a positive is missing or more negatives are asked for than exist."""
    lists = checked_positives(positives, len(texts[0]), len(texts[1]), places(texts[1]))
    _check_number(rules, len(texts[1]) - int(lists.sizes.min()))


def _check_number(rules: Rules, most: int) -> None:
    if rules.num_negatives > most:
        raise ValueError(
            f"num_negatives={rules.num_negatives}, but the corpus has {most} documents that are not positives: "
            "ask for fewer, or add documents"
        )


def _vectors(
    queries: Any,
    corpus: Any,
    positives: Any,
    rules: Rules,
    model: Any,
    prompts: Any,
    cache: str | Path | None,
    engine: str,
) -> tuple[Vectors, Vectors, Texts | None]:
    """Queries and corpus as embeddings, and their texts."""
    for name, given in (("queries", queries), ("corpus", corpus)):
        if isinstance(given, Sequence) and not len(given) and not isinstance(given, str):
            raise ValueError(f"{name} is empty: give at least one text or embedding")
    textual = is_texts(queries), is_texts(corpus)
    if not any(textual):
        for name, given in (("model", model), ("prompts", prompts), ("cache", cache)):
            if given is not None:
                raise ValueError(f"{name}= is for texts, but queries and corpus are embeddings: leave it out")
        return open_vectors("queries", queries), open_vectors("corpus", corpus), None
    if not all(textual):
        kinds = ("texts", "embeddings") if textual[0] else ("embeddings", "texts")
        raise ValueError(f"queries are {kinds[0]}, but the corpus {kinds[1]}: give texts or embeddings for both")
    if model is None:
        raise ValueError("queries and corpus are texts: pass model=, a SentenceTransformer or a function of texts")
    texts = checked_texts("queries", queries), checked_texts("corpus", corpus)
    check_texts(texts, positives, rules)
    given_prompts, folder = checked_prompts(prompts), None if cache is None else Path(cache)
    embedded = [
        embed(name, some, model, given_prompts.get(name), folder, engine)
        for name, some in zip(("queries", "corpus"), texts, strict=True)
    ]
    return embedded[0], embedded[1], texts
