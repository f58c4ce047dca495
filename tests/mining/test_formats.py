"""The formats of training sets against sentence-transformers' mine_hard_negatives, and the files."""

import csv
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import hardneg as hn


class GivenModel:
    """What mine_hard_negatives uses of a SentenceTransformer; the embedding of a text is drawn from the text."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        util = pytest.importorskip("sentence_transformers.util")
        self.similarity, self.similarity_pairwise = util.cos_sim, util.pairwise_cos_sim

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return embedded(texts)

    encode_document = encode_query

    def get_embedding_dimension(self) -> int:
        return 16


def embedded(texts: list[str]) -> np.ndarray:
    """Unit vectors: "q3" and "d3" are near each other, and "d3" is near "d4" and "d5"."""
    rows = []
    for text in texts:
        number = int(text[1:])
        group = np.random.default_rng(number // 6).standard_normal(16)
        own = np.random.default_rng(1000 + number).standard_normal(16)
        noise = np.random.default_rng(5000 + number).standard_normal(16) * (text[0] == "q")
        rows.append(group + 0.8 * own + 0.7 * noise)
    found = np.array(rows, np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


QUERIES = [f"q{n}" for n in range(20)]
POSITIVES = [[f"d{n}", f"d{n + 30}"] if n % 3 == 0 else [f"d{n}"] for n in range(20)]
CORPUS = [f"d{n}" for n in range(60)]


@pytest.fixture(scope="module")
def mined() -> hn.Mined:
    with pytest.warns(UserWarning, match="fewer than 4 negatives"):
        return hn.mine(
            QUERIES, CORPUS, POSITIVES, model=embedded, num_negatives=4, rank_range=(0, 12),
            hardening=(hn.BelowPositive(margin=0.02), hn.BelowPositive(relative=0.95)),
        )  # fmt: skip


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("form", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
def test_rows_are_those_of_sentence_transformers(form: str, scores: bool, mined: hn.Mined) -> None:
    datasets = pytest.importorskip("datasets")
    st = pytest.importorskip("sentence_transformers.util")
    pairs = [(query, one) for query, some in zip(QUERIES, POSITIVES, strict=True) for one in some]
    expected = st.mine_hard_negatives(
        datasets.Dataset.from_dict({"anchor": [q for q, _ in pairs], "positive": [p for _, p in pairs]}),
        GivenModel(), corpus=CORPUS, num_negatives=4, absolute_margin=0.02, relative_margin=0.05, range_max=12,
        output_format=form, output_scores=scores, verbose=False,
    ).to_list()  # fmt: skip
    found = list(mined.rows(form, scores=scores))
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert [*one] == [*other]
        for name in one:
            if name in ("score", "scores"):
                np.testing.assert_allclose(one[name], other[name], atol=1e-6)
            else:
                assert one[name] == other[name]


def test_files_hold_the_rows(mined: hn.Mined, tmp_path: Path) -> None:
    rows = list(mined.rows("labeled-list", scores=True))
    assert mined.save(tmp_path / "a.jsonl", format="labeled-list", scores=True) == len(rows)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
    mined.save(tmp_path / "a.parquet", format="labeled-list", scores=True)
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == rows
    mined.save(tmp_path / "a.csv", format="triplet")
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == list(mined.rows("triplet"))
    mined.save_dropped(tmp_path / "dropped.jsonl")
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == sum(len(mined.dropped_of(query)) for query in range(20)) > 0
    assert {row["rule"] for row in dropped} == {"BelowPositive"}
    assert {file.name for file in tmp_path.iterdir()} == {"a.jsonl", "a.parquet", "a.csv", "dropped.jsonl"}


def test_indices_take_the_place_of_texts_for_embeddings() -> None:
    mined = hn.mine(np.eye(3), np.eye(3), [0, 1, 2], num_negatives=1)
    assert next(mined.rows("triplet")) == {"anchor": 0, "positive": 0, "negative": 1}


@pytest.mark.parametrize(
    ("path", "form", "message"),
    [("a.txt", "triplet", "the ending of the file"), ("a.jsonl", "tripled", "did you mean 'triplet'"),
     ("no/a.jsonl", "triplet", "there is no folder"), ("a.csv", "labeled-list", "holds lists")],
)  # fmt: skip
def test_a_mistake_writes_nothing(path: str, form: str, message: str, mined: hn.Mined, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        mined.save(tmp_path / path, format=form)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_former_file(mined: hn.Mined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("former")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.jsonl"):
        mined.save(tmp_path / "a.jsonl")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["former"]


def test_the_summary_counts_what_the_result_holds(mined: hn.Mined) -> None:
    summary = mined.summary()
    assert summary["negatives"] == int((mined.indices >= 0).sum())
    assert summary["queries_with_too_few"] == len(mined.short) > 0
    assert summary["negative_cosines"]["max"] == float(mined.scores.max())
    counts = np.bincount(mined.indices[mined.indices >= 0], minlength=60)
    assert mined.hubs(3)[0][1] == counts.max()
