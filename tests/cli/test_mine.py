"""``hardneg mine``: its output is that of `hn.mine`, it survives a kill, and a mistake writes nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import children
import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import hardneg

import hardneg as hn

DRAW = np.random.default_rng(0)
CORPUS = DRAW.standard_normal((400, 16)).astype(np.float32)
QUERIES = CORPUS[:150] + 0.5 * DRAW.standard_normal((150, 16)).astype(np.float32)
FRUITS = [f"{color} {fruit}" for color in ("red", "green", "blue") for fruit in ("apple", "pear", "plum", "fig")]


@pytest.fixture
def folder(empty_folder: Path) -> Path:
    """A working directory with embeddings and pairs of texts."""
    np.save("queries.npy", QUERIES)
    np.save("corpus.npy", CORPUS)
    np.save("positives.npy", np.arange(150))
    lines = [json.dumps({"query": f"a {text}", "positive": text}) for text in FRUITS]
    Path("pairs.jsonl").write_text("\n".join(lines) + "\n")
    return empty_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny SentenceTransformer: the mean of word vectors."""
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(dict.fromkeys(["[UNK]", "a", *" ".join(FRUITS).split()]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    weights = np.random.default_rng(1).standard_normal((len(words), 8)).astype(np.float32)
    place = tmp_path_factory.mktemp("model")
    st.SentenceTransformer(modules=[modules.StaticEmbedding(tokenizer, embedding_weights=weights)]).save(str(place))
    return str(place)


def command(*more: str) -> list[str]:
    return ["mine", "queries.npy", "--corpus", "corpus.npy", "--positives", "positives.npy", "-n", "3", *more]


def test_embeddings_are_mined_as_in_python(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    before = set(folder.iterdir())
    code, out, err = hardneg(
        capsys,
        *command("--to", "mined.parquet", "--format", "n-tuple", "--scores", "--dropped", "dropped.jsonl", "--json"),
    )
    assert code == 0, err
    expected = hn.mine(QUERIES, CORPUS, np.arange(150), num_negatives=3)
    assert pq.read_table("mined.parquet").to_pylist() == list(expected.rows("n-tuple", scores=True))
    assert json.loads(out)["dropped"] == expected.dropped
    dropped = [json.loads(line) for line in Path("dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == sum(len(expected.dropped_of(query)) for query in range(150))
    assert set(folder.iterdir()) - before == {folder / "mined.parquet", folder / "dropped.jsonl"}


def test_options_are_the_rules_of_python(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = ["--margin", "0.1", "--min-score", "-0.2", "--max-score", "0.6", "--ring", "0.2", "0.98"]
    options += ["--rank-range", "2:300", "--sample", "--beta", "2", "--seed", "5"]
    code, _, err = hardneg(capsys, *command("--to", "mined.jsonl", *options))
    assert code == 0, err
    rules = (hn.BelowPositive(margin=0.1), hn.Threshold(cosine=-0.2), hn.Ring(0.2, 0.98), hn.Exponential(2.0))
    expected = hn.mine(
        QUERIES, CORPUS, np.arange(150), num_negatives=3, hardening=rules, max_score=0.6, rank_range=(2, 300),
        sample=True, seed=5,
    )  # fmt: skip
    found = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    assert found == list(expected.rows("triplet"))


def test_pairs_of_a_file_are_left_out_with_the_reason(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    usual = hn.mine(QUERIES, CORPUS, np.arange(150), num_negatives=3)
    best = usual.indices[:20, 0].tolist()
    Path("no.jsonl").write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in enumerate(best)))
    options = ["--to", "mined.jsonl", "--not-negatives", "no.jsonl", "--dropped", "dropped.jsonl"]
    code, out, err = hardneg(capsys, *command(*options, "--json"))
    assert code == 0, err
    expected = hn.mine(QUERIES, CORPUS, np.arange(150), num_negatives=3, not_negatives=list(enumerate(best)))
    assert [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()] == list(expected.rows("triplet"))
    assert json.loads(out)["dropped"]["not_negatives"] == 20
    dropped = [json.loads(line) for line in Path("dropped.jsonl").read_text().splitlines()]
    reasons = [(row["anchor"], row["document"]) for row in dropped if row["rule"] == "not_negatives"]
    assert reasons == list(enumerate(best))

    Path("no.jsonl").write_text('{"a": 0, "b": 400}\n')
    before = set(folder.iterdir())
    code, _, err = hardneg(capsys, *command("--to", "other.jsonl", "--not-negatives", "no.jsonl"))
    assert code == 2
    assert "no.jsonl, line 1: there is no document 400" in err
    assert set(folder.iterdir()) == before


def test_an_index_finds_the_candidates(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(16)
    index.add(CORPUS / np.linalg.norm(CORPUS, axis=1, keepdims=True))
    faiss.write_index(index, "corpus.faiss")
    assert hardneg(capsys, *command("--to", "exact.jsonl"))[0] == 0
    code, out, err = hardneg(capsys, *command("--to", "found.jsonl", "--index", "corpus.faiss"))
    assert code == 0
    assert "recall of the index: 1.000 of the best documents" in out + err
    assert Path("found.jsonl").read_text() == Path("exact.jsonl").read_text()
    Path("corpus.faiss").write_bytes(b"nothing")
    code, out, err = hardneg(capsys, *command("--to", "other.jsonl", "--index", "corpus.faiss"))
    assert code == 2
    assert "corpus.faiss is not an index that faiss can read" in err


def test_texts_are_embedded_and_grouped_by_query(capsys: pytest.CaptureFixture[str], folder: Path, model: str) -> None:
    with Path("pairs.jsonl").open("a") as file:
        file.write(json.dumps({"query": "a red apple", "positive": "red pear"}) + "\n")
    code, out, err = hardneg(
        capsys,
        "mine",
        "pairs.jsonl",
        "--model",
        model,
        "-n",
        "2",
        "--any-score",
        "--to",
        "mined.jsonl",
        "--page",
        "p.html",
    )
    assert code == 0, err
    assert "12 queries, 24 negatives" in out
    rows = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    assert len(rows) == 26  # the first query has two positives
    assert not {row["negative"] for row in rows if row["anchor"] == "a red apple"} & {"red apple", "red pear"}
    assert "a red apple" in Path("p.html").read_text()
    assert not list(folder.glob(".*"))


def blocks(folder: Path) -> dict[str, int]:
    """The finished blocks of unfinished work, with the times they were written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.glob(".mined.jsonl.unfinished/block-*.npz")}


def test_a_killed_command_continues_with_the_same_result(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = command("--memory", "40000", "--dropped", "dropped.jsonl")
    code, _, err = hardneg(capsys, *arguments, "--to", "whole.jsonl")
    assert code == 0, err
    whole, dropped = Path("whole.jsonl").read_bytes(), Path("dropped.jsonl").read_bytes()
    Path("dropped.jsonl").unlink()
    slow = "import time, hardneg.mining.blocks as b; run = b.Job.run; "
    slow += "b.Job.run = lambda *given: (time.sleep(0.2), run(*given))[1]; import hardneg.cli as cli; cli.main()"
    started = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments, "--to", "mined.jsonl"], env=os.environ, stderr=subprocess.DEVNULL
    )
    try:
        limit = time.monotonic() + 120
        while len(blocks(folder)) < 3 and started.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        children.kill(started.pid)
        started.wait()
    finished = blocks(folder)
    assert len(finished) >= 3
    assert not Path("mined.jsonl").exists()
    seen: dict[str, int] = {}
    original = hn.mining.engines.run_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hardneg.mining.resumable.run_blocks", lambda *given: (original(*given), seen.update(blocks(folder)))[0]
        )
        code, _, err = hardneg(capsys, *arguments, "--to", "mined.jsonl")
    assert code == 0, err
    assert {name: seen[name] for name in finished} == finished  # not computed again
    assert len(seen) > len(finished)
    assert Path("mined.jsonl").read_bytes() == whole
    assert Path("dropped.jsonl").read_bytes() == dropped
    assert not list(folder.glob(".*"))


def test_unfinished_work_of_other_settings_is_not_used(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    def stopped(*given: object) -> None:
        raise ValueError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hardneg.mining.resumable.finish", stopped)
        assert hardneg(capsys, *command("--to", "mined.jsonl", "--max-score", "0.3"))[0] == 2
    assert blocks(folder)
    assert hardneg(capsys, *command("--to", "mined.jsonl"))[0] == 0
    expected = hn.mine(QUERIES, CORPUS, np.arange(150), num_negatives=3)
    assert [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()] == list(expected.rows())


def not_utf8() -> None:
    Path("pairs.jsonl").write_bytes(b'{"query": "\xff", "positive": "a"}\n')


def truncated_json() -> None:
    Path("pairs.jsonl").write_text('{"query": "a", "positive": "b"}\n{"query": "a", "pos')


def empty_text() -> None:
    Path("pairs.jsonl").write_text('{"query": " ", "positive": "b"}\n')


def no_text() -> None:
    Path("pairs.jsonl").write_text('{"query": "a", "positive": 3}\n')


def missing_positive() -> None:
    Path("documents.txt").write_text("red apple\ngreen apple\n")


def truncated_npy() -> None:
    content = Path("corpus.npy").read_bytes()
    Path("corpus.npy").write_bytes(content[:-100])


def nan() -> None:
    np.save("corpus.npy", np.where(np.arange(400)[:, None] == 7, np.nan, CORPUS))


def one_document() -> None:
    np.save("corpus.npy", CORPUS[:1])
    np.save("positives.npy", np.zeros(150, int))


def no_positives() -> None:
    np.save("positives.npy", np.full(150, -1))


def nothing() -> None:
    pass


TEXTS = ["mine", "pairs.jsonl", "--model", "MODEL", "-n", "2", "--to", "mined.jsonl"]
EMBEDDINGS = command("--to", "mined.jsonl")
MISTAKES: list[tuple[Callable[[], None], list[str], str]] = [
    (not_utf8, TEXTS, "pairs.jsonl is not UTF-8"),
    (truncated_json, TEXTS, "pairs.jsonl cannot be read"),
    (empty_text, TEXTS, "queries of pairs.jsonl[0] is empty"),
    (missing_positive, [*TEXTS, "--corpus", "documents.txt"], "a positive of query 1 is not in the corpus: 'red pear'"),
    (nothing, [*TEXTS, "-n", "12"], "num_negatives=12, but the corpus has 11 documents"),
    (nothing, [*TEXTS, "--positives", "positives.npy"], "--positives is for embeddings"),
    (truncated_npy, EMBEDDINGS, "corpus.npy is cut off"),
    (nan, EMBEDDINGS, "corpus.npy holds NaN or inf in row 7"),
    (one_document, EMBEDDINGS, "the corpus has 0 documents that are not positives"),
    (no_positives, EMBEDDINGS, "query 0 has no positives"),
    (nothing, [*EMBEDDINGS, "--cache", "c"], "--cache is for texts"),
    (nothing, [*EMBEDDINGS, "--rank-range", "5"], "--rank-range '5' must be FIRST:END"),
    (nothing, [*EMBEDDINGS, "--margin", "1", "--any-score"], "give one of --relative"),
    (nothing, [*EMBEDDINGS, "--format", "quad"], "--format='quad' is not known"),
    (nothing, [*EMBEDDINGS, "--beta", "1"], "pass sample=True"),
    (nothing, command("--to", "no/mined.jsonl"), "there is no folder 'no'"),
    (nothing, [*EMBEDDINGS, "--page", "no/page.html"], "there is no folder 'no'"),
    (nothing, [*EMBEDDINGS, "--page", "."], "is a folder"),
    (nothing, [*EMBEDDINGS, "--dropped", "mined.jsonl"], "mined.jsonl is read, or written twice"),
    (nothing, [*TEXTS, "--to", "pairs.jsonl"], "pairs.jsonl is read, or written twice"),
    (nothing, command("--to", "mined.csv", "--scores"), "rows with lists cannot be written to mined.csv"),
    (no_text, TEXTS, "positives of 'a'[0] must be a text, got int"),
    (nothing, ["mine", "gone.jsonl", "--model", "MODEL", "--to", "m.jsonl"], "there is no file 'gone.jsonl'"),
]


@pytest.mark.parametrize(("prepare", "arguments", "message"), MISTAKES, ids=[mistake[2][:40] for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_writes_nothing(
    prepare: Callable[[], None],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    model: str,
) -> None:
    prepare()
    before = sorted(folder.rglob("*"))
    code, out, err = hardneg(capsys, *(model if each == "MODEL" else each for each in arguments))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
