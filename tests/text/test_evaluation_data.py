"""Reading the sources that an encoder is evaluated on."""

from pathlib import Path

import pytest

from hardneg.text import evaluation_data


@pytest.mark.parametrize("score", ["nan", "inf", "high"])
def test_a_score_that_is_not_finite_is_named_with_its_file(tmp_path: Path, score: str) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(f"sentence1,sentence2,score\na,b,1\nc,d,{score}\n")
    with pytest.raises(ValueError, match=r"pairs\.csv.* not a (finite )?number"):
        evaluation_data.find(str(pairs))
    (tmp_path / "qrels").mkdir()
    for name in ("queries.jsonl", "corpus.jsonl"):
        (tmp_path / name).write_text('{"_id": "1", "text": "a"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n1\t1\t{score}\n")
    with pytest.raises(ValueError, match=r"test\.tsv.* not a (finite )?number"):
        evaluation_data.find(str(tmp_path))
