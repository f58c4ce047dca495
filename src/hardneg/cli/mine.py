"""``hardneg mine``: the command over `hardneg.mine`, for files; it continues where a former one was stopped."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hardneg.cli.app import app
from hardneg.terminal import cell, note, out, print_json, say

if TYPE_CHECKING:
    from hardneg.losses.hardening import Hardening
    from hardneg.mining.resumable import Input

# Modules that take seconds to import (torch) are imported in the command, so that --help is fast.
EXAMPLES = """Examples:

    hardneg mine pairs.jsonl --model sentence-transformers/all-MiniLM-L6-v2 --to mined.jsonl

    hardneg mine pairs.csv --corpus documents.parquet --model my-model/ --to mined.parquet --format n-tuple --scores

    hardneg mine queries.npy --corpus corpus.npy --positives positives.npy --to mined.parquet

Run the same command again after an interruption: what is finished is not repeated."""
_QUERY = ("anchor", "query", "question", "sentence1")
_POSITIVE = ("positive", "answer", "document", "passage", "sentence2")
_TEXT = ("text", "document", "passage", "positive", "contents")


@app.command(epilog=EXAMPLES)
def mine(
    queries: Annotated[
        Path,
        typer.Argument(
            help="Pairs of texts (.jsonl, .csv, .parquet, a saved dataset), in columns such as query and positive, "
            "question and answer, or the first two; without --model, embeddings."
        ),
    ],
    to: Annotated[Path, typer.Option(help="The training set: a .jsonl, .parquet or .csv file.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help="Documents, in a column such as text, or the first [default: the positives of the pairs]."),
    ] = None,
    positives: Annotated[Path | None, typer.Option(help="Without --model: .npy of indices, (Q,) or (Q, P).")] = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of a SentenceTransformer.")] = None,
    num_negatives: Annotated[int, typer.Option("--num-negatives", "-n", help="Per query.")] = 10,
    relative: Annotated[
        float | None, typer.Option(help="Highest score, as a share of the lowest positive's [default: 0.95].")
    ] = None,
    margin: Annotated[float | None, typer.Option(help="Instead: distance below the lowest positive's score.")] = None,
    any_score: Annotated[
        bool, typer.Option("--any-score", help="Instead: do not compare with the score of a positive.")
    ] = False,
    min_score: Annotated[float | None, typer.Option(help="Lowest cosine of a negative.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Highest cosine of a negative.")] = None,
    ring: Annotated[
        tuple[float, float] | None, typer.Option(help="Percentiles of each query's candidates, such as 0.9 0.99.")
    ] = None,
    rank_range: Annotated[str, typer.Option(help="FIRST:END of the ranks to choose from, such as 10:100.")] = "0:",
    sample: Annotated[bool, typer.Option("--sample", help="Draw from the candidates instead of the best.")] = False,
    beta: Annotated[float | None, typer.Option(help="With --sample: weights e^(beta·cosine).")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    guide: Annotated[str | None, typer.Option(help="A cross-encoder that filters false negatives.")] = None,
    not_negatives: Annotated[
        Path | None, typer.Option(help="Pairs that are no negatives: .jsonl or .parquet, query a and document b.")
    ] = None,
    query_prompt: Annotated[str | None, typer.Option(help="Put before each query.")] = None,
    corpus_prompt: Annotated[str | None, typer.Option(help="Put before each document.")] = None,
    form: Annotated[str, typer.Option("--format", help="triplet, n-tuple, labeled-pair or labeled-list.")] = "triplet",
    scores: Annotated[bool, typer.Option("--scores", help="Add the cosines.")] = False,
    dropped: Annotated[Path | None, typer.Option(help="Also write the dropped candidates, with the reasons.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write a page to look at: negatives, dropped, hubs.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of embeddings to use again.")] = None,
    memory: Annotated[str, typer.Option(help="Of the search, beyond the model's.")] = "2GiB",
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    index: Annotated[
        Path | None, typer.Option(help="A faiss index of the corpus, searched instead of all documents.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Find hard negatives for each query of a training set, by exact search in a corpus of any size."""
    from hardneg import checks
    from hardneg.mining import resumable
    from hardneg.mining.formats import FORMATS, check_place, check_target, has_lists
    from hardneg.mining.memory import checked_memory
    from hardneg.mining.negatives import refuse_index
    from hardneg.mining.rules import checked_rules
    from hardneg.mining.tasks import ENGINES

    checks.choice("--format", form, [*FORMATS])
    checks.choice("--engine", engine, ENGINES)
    refuse_index(engine, index)
    check_target(to, has_lists(form, scores))
    if dropped is not None:
        check_target(dropped)
    if page is not None:
        check_place(page)
    _refuse_same_files((to, dropped, page), (queries, corpus, positives, not_negatives, index))
    hardening = _hardening(relative, margin, any_score, min_score, ring, beta)
    rules = checked_rules(num_negatives, hardening, _ranks(rank_range), max_score, sample, seed)
    budget = checked_memory(memory)
    prompts = {"queries": query_prompt, "corpus": corpus_prompt}
    given_prompts = {name: prompt for name, prompt in prompts.items() if prompt is not None}
    if model is None:
        _refuse_with_embeddings({"--guide": guide, "--cache": cache, "a prompt": given_prompts or None})
        given = _embeddings(queries, corpus, positives)
    else:
        given = _texts(queries, corpus, positives, model, given_prompts, guide, cache)
    given = replace(given, not_negatives=not_negatives, index=index)
    if engine == "ray":
        _join_cluster()
    mined = resumable.mine_to(to, given, rules, budget, engine)
    if dropped is not None:
        mined.save_dropped(dropped)
    if page is not None:
        mined.write_page(page)
    rows = mined.save(to, form, scores)
    resumable.discard(to)
    if as_json:
        print_json({"file": str(to), "rows": rows, **mined.summary()})
        return
    if not rows:
        note("no query has negatives: see --dropped FILE for the reasons")
    _show(mined.summary())
    say(f"{to}: {rows} rows")


def _show(summary: dict[str, Any]) -> None:
    table = Table("", "min", "25 %", "median", "75 %", "max", box=None)
    for name in ("positive_cosines", "negative_cosines"):
        table.add_row(name.replace("_", " "), *(f"{value:.3f}" for value in summary[name].values()))
    out.print(table)
    reasons = ", ".join(f"{number:,} by {cell(rule)}" for rule, number in summary["dropped"].items()) or "none"
    say(f"{summary['queries']:,} queries, {summary['negatives']:,} negatives; dropped: {reasons}")
    if "recall" in summary:
        say(f"recall of the index: {summary['recall']:.3f} of the best documents, on a sample of the queries")


def _hardening(
    relative: float | None,
    margin: float | None,
    any_score: bool,
    min_score: float | None,
    ring: tuple[float, float] | None,
    beta: float | None,
) -> "tuple[Hardening, ...]":
    import hardneg as hn

    if sum((relative is not None, margin is not None, any_score)) > 1:
        raise ValueError("give one of --relative, --margin and --any-score")
    parts: list[Hardening] = []
    if not any_score:
        below = {"margin": margin} if margin is not None else {"relative": 0.95 if relative is None else relative}
        parts.append(hn.BelowPositive(**below))
    if min_score is not None:
        parts.append(hn.Threshold(cosine=min_score))
    if ring is not None:
        parts.append(hn.Ring(*ring))
    if beta is not None:
        parts.append(hn.Exponential(beta))
    return tuple(parts)


def _ranks(given: str) -> tuple[int, int | None]:
    first, colon, end = given.partition(":")
    if not colon or not (first or "0").isdecimal() or not (end or "0").isdecimal():
        raise ValueError(f"--rank-range {given!r} must be FIRST:END, such as 10:100 or 10: for no end")
    return int(first or 0), int(end) if end else None


def _refuse_same_files(outputs: tuple[Path | None, ...], inputs: tuple[Path | None, ...]) -> None:
    taken = {file.resolve() for file in inputs if file is not None}
    for file in outputs:
        if file is None:
            continue
        if file.resolve() in taken:
            raise ValueError(f"{file} is read, or written twice: name another file for the output")
        taken.add(file.resolve())


def _refuse_with_embeddings(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is for texts, which need --model: add it, or leave {name} out")


def _embeddings(queries: Path, corpus: Path | None, positives: Path | None) -> "Input":
    """Files of embeddings, and indices of the positives."""
    import numpy as np

    from hardneg.checks import regular_file
    from hardneg.mining.resumable import Input

    if corpus is None or positives is None:
        raise ValueError("give --model for texts, or --corpus and --positives for embeddings")
    if not positives.exists():
        raise ValueError(f"there is no file {str(positives)!r}: give a .npy file of indices")
    try:
        indices = np.load(regular_file(positives), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{positives} is not a readable .npy file of integers ({error})") from error
    return Input(queries, corpus, indices)


def _texts(
    pairs: Path,
    corpus: Path | None,
    positives: Path | None,
    model: str,
    prompts: dict[str, str],
    guide: str | None,
    cache: Path | None,
) -> "Input":
    """Texts of pairs, one entry for each distinct query, and the models."""
    from hardneg.extras import required
    from hardneg.mining.resumable import Input
    from hardneg.mining.texts import checked_texts, read_columns

    if positives is not None:
        raise ValueError("--positives is for embeddings: the pairs name the positives of texts")
    anchors, given = read_columns(pairs, (_QUERY, _POSITIVE))
    lists = [one if isinstance(one, list) else [one] for one in given]
    positives_of: dict[str, list[str]] = {}
    for anchor, some in zip(checked_texts(f"queries of {pairs}", anchors), lists, strict=True):
        positives_of.setdefault(anchor, []).extend(checked_texts(f"positives of {anchor[:40]!r}", some))
    documents = list(dict.fromkeys(text for some in positives_of.values() for text in some))
    if corpus is not None:
        documents = checked_texts(str(corpus), read_columns(corpus, (_TEXT,))[0])
    library = required("sentence_transformers", "text")
    encoder = library.SentenceTransformer(model)
    filter_guide = None if guide is None else library.CrossEncoder(guide)
    return Input(list(positives_of), documents, [*positives_of.values()], encoder, prompts, filter_guide, cache)


def _join_cluster() -> None:
    """Connect to the Ray cluster of RAY_ADDRESS, or of this machine."""
    from hardneg.extras import required

    ray = required("ray", "cluster")
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ValueError("--engine ray found no cluster: ray start --head starts one") from error
