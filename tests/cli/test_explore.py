"""``hardneg explore`` on files: its page, its table, and mistakes that write nothing."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands import hardneg

DRAW = np.random.default_rng(0)
FEATURES = DRAW.standard_normal((60, 8)).astype(np.float32)
LABELS = np.arange(60) % 4


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("features.npy", FEATURES)
    np.save("early.npy", FEATURES[:, ::-1].copy())
    np.save("labels.npy", LABELS)
    Path("labels.txt").write_text("\n".join(f"class {label}" for label in LABELS))
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": f"text {row}"}) for row in range(60)))


def data(page: str) -> dict[str, Any]:
    block = re.search(r'<script type="application/json">(.*?)</script>', Path(page).read_text(encoding="utf-8"))
    assert block is not None
    found: dict[str, Any] = json.loads(block[1])
    return found


def test_a_page_and_a_table_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--labels", "labels.txt", "--texts", "texts.jsonl", "--checkpoints", "early.npy", "--guide", "early.npy",
               "--positives", "features.npy", "--beta", "2", "--ring", "0.5", "1", "--temperature", "0.2",
               "--class-prior", "0.05", "--export", "out.parquet"]  # fmt: skip
    code, out, err = hardneg(capsys, "explore", "features.npy", *options)
    assert (code, err) == (0, "")
    assert "explore.html: 60 texts" in out
    found = data("explore.html")
    assert found["classes"] == ["class 0", "class 1", "class 2", "class 3"]
    assert found["texts"][3] == "text 3"
    assert [each["name"] for each in found["checkpoints"]] == ["features", "early"]
    assert found["setting"] == {
        "temperature": 0.2,
        "beta": 2.0,
        "prior": 0.05,
        "lower": 0.5,
        "upper": 1.0,
        "labels": False,
    }
    assert "guide's cosine" in found["suspects"][0][3]
    table = pq.read_table("out.parquet").to_pydict()
    assert [*table] == ["id", "label", "x", "y", "neighbors", "cosines", "weights", "text"]
    unit = torch.nn.functional.normalize(torch.from_numpy(FEATURES).double(), dim=1)
    cosines = unit @ unit.T
    for row in (0, 17):
        others = cosines[row].clone()
        others[row] = -2
        near = others.sort(descending=True)
        assert table["neighbors"][row] == near.indices[:20].tolist()
        np.testing.assert_allclose(table["cosines"][row], near.values[:20], atol=1e-6)
        # The upper half of 59 candidates: ranks 29 to 58, so the 30 most similar.
        weights = (2 / 0.2 * near.values[:30]).softmax(dim=0)
        np.testing.assert_allclose(table["weights"][row], weights[:20], rtol=1e-5)
        assert table["label"][row] == f"class {row % 4}"


def test_more_samples_than_asked_for_are_drawn_by_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    ids = []
    for seed in ("1", "1", "2"):
        code, out, _ = hardneg(capsys, "explore", "features.npy", "--samples", "20", "--seed", seed, "--json")
        assert code == 0
        assert json.loads(out)["samples"] == 20
        ids.append(data("explore.html")["ids"])
    assert ids[0] == ids[1] != ids[2]


def test_texts_and_ids_of_an_archive_are_shown_and_exported(capsys: pytest.CaptureFixture[str]) -> None:
    ids, texts = np.arange(60, dtype=np.uint64) + (1 << 63), np.array([f"text {row}" for row in range(60)])
    np.savez("all.npz", embeddings=FEATURES, ids=ids, texts=texts)
    code, _, err = hardneg(capsys, "explore", "all.npz", "--export", "out.parquet", "--json")
    assert (code, err) == (0, "")
    found, table = data("explore.html"), pq.read_table("out.parquet").to_pydict()
    assert found["texts"] == table["text"] == texts.tolist()
    assert [json.loads(each) for each in found["ids"]] == ids.tolist()
    assert table["id"] == [str(each) for each in ids.tolist()]  # beyond int64


def test_lone_surrogates_are_escaped_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lone.jsonl").write_text("\n".join(json.dumps({"text": f"\ud800 {row}"}) for row in range(60)))
    Path("labels.jsonl").write_text("\n".join(json.dumps({"label": f"\udfff{row % 3}"}) for row in range(60)))
    given = ["--texts", "lone.jsonl", "--labels", "labels.jsonl"]
    code, _, err = hardneg(capsys, "explore", "features.npy", *given, "--export", "out.parquet", "--json")
    assert (code, err) == (0, "")
    table = pq.read_table("out.parquet").to_pydict()
    assert (table["text"][5], table["label"][5]) == (r"\ud800 5", r"\udfff2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.npy"], "there is no file 'missing.npy'"),
        (["features.npy", "--labels", "missing.npy"], "there is no file 'missing.npy'"),
        (["features.npy", "--texts", "missing.txt"], "there is no file 'missing.txt'"),
        (["features.npy", "--positives", "labels.npy"], "must have shape (N, d)"),
        (["features.npy", "--checkpoints", "features.npy"], "must have different names"),
        (["features.npy", "--samples", "1"], "--samples must be from 2 to 5,000, got 1"),
        (["features.npy", "--export", "x.csv"], "--export 'x.csv' must end in .parquet"),
        (["features.npy", "--ring", "0.9", "0.1"], "lower must be < upper"),
        (["features.npy", "--temperature", "0"], "temperature"),
        (["features.npy", "--beta", "-1"], "--beta must be ≥ 0"),
        (["features.npy", "--class-prior", "1"], "class_prior must be"),
        (["features.npy", "--images", "features.npy"], "images must be uint8"),
        (["features.npy", "--to", "."], "is a folder"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = {*tmp_path.iterdir()}
    code, out, err = hardneg(capsys, "explore", *options)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err
    assert {*tmp_path.iterdir()} == before
