"""Pairs that are left out of mined negatives, against the loop over all documents, and from files."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mining import loop
from mining.test_negatives import exact_case

import hardneg as hn
from hardneg.mining import resumable
from hardneg.mining.not_negatives import is_one_set
from hardneg.mining.rules import checked_rules

RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "relative": ({}, {"relative": 0.95}),
    "ring": ({"hardening": hn.Ring(0.5, 0.9)}, {"ring": (0.5, 0.9)}),
    "ranks and a limit": (
        {"hardening": hn.Uniform(), "max_score": 0.5, "rank_range": (2, 40)},
        {"max_score": 0.5, "rank_range": (2, 40)},
    ),
}


def mine(*case: Any, **options: Any) -> hn.Mined:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of queries with too few
        return hn.mine(*case, num_negatives=4, **options)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("size", [80, 400])  # also more than 64 of a query, which are hidden from its search
def test_left_out_documents_are_as_if_they_were_not_in_the_corpus(rules: str, size: int) -> None:
    """The loop has no such rule: it is given the rest of the corpus, one query at a time."""
    options, expected_options = RULES[rules]
    reached: Counter[str] = Counter()
    for seed in range(4):
        queries, corpus, positives = exact_case(seed, queries=4, documents=160)
        draw = np.random.default_rng(seed)
        pairs = np.stack([draw.integers(4, size=size), draw.integers(160, size=size)], axis=1)
        found = mine(queries, corpus, positives, not_negatives=pairs, **options)
        total: Counter[str] = Counter()
        for query in range(4):
            known = {d for d in range(160) for p in positives[query] if loop.same(corpus[d], corpus[p])}
            out = {int(document) for other, document in pairs if other == query} - known - {*positives[query]}
            kept = [d for d in range(160) if d not in out]
            places = [kept.index(p) for p in positives[query]]
            expected = loop.mined(queries[query, None], corpus[kept], [places], 4, **expected_options)
            right = [kept[place] for place in expected.negatives[0]]
            assert [i for i in found.indices[query].tolist() if i >= 0] == right
            total += Counter(expected.dropped) + Counter(not_negatives=len(out))
            listed = found.dropped_of(query)
            assert [score for _, score, _ in listed] == sorted((score for _, score, _ in listed), reverse=True)
            assert len(listed) <= 100
            shown = {document for document, _, rule in listed if rule == "not_negatives"}
            assert shown <= out
            assert shown == out or len(listed) == 100
            reached["left out"] += len(out)
            without = mine(queries, corpus, positives, **options).indices[query].tolist()
            reached["changed"] += without != found.indices[query].tolist()
        assert found.dropped == {name: number for name, number in total.items() if number}
    assert reached["left out"] > 40
    assert reached["changed"] > 3


def test_pairs_of_a_set_with_itself_hold_in_both_directions(tmp_path: Path) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"a": 3, "b": "7"}\n')
    rules = {"hardening": hn.Uniform(), "num_negatives": 18}
    found = hn.mine(vectors, vectors.clone(), torch.arange(20), not_negatives=file, **rules)
    assert 7 not in found.indices[3]
    assert 3 not in found.indices[7]
    assert found.dropped == {"not_negatives": 2}
    other = hn.mine(vectors[:10], vectors, torch.arange(10), not_negatives=[(3, 7)], **rules)
    assert 7 not in other.indices[3]
    assert 3 in other.indices[7]
    np.save(tmp_path / "one.npy", vectors.numpy())
    mapped = [np.load(tmp_path / "one.npy", mmap_mode="r") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of read-only arrays
        assert is_one_set(*mapped)
        assert not is_one_set(mapped[0], mapped[1][::-1])
    assert is_one_set(tmp_path / "one.npy", str(tmp_path / "." / "one.npy"))
    assert not is_one_set(["a", "b"], ["a", "c"])
    assert is_one_set(["a", "b"], ("a", "b"))


def test_texts_are_named_by_themselves_with_all_their_copies() -> None:
    corpus = ["red apple", "green apple", "blue fig", "green apple", "red pear", "red fig"]
    words = sorted({word for text in corpus for word in text.split()})

    def model(texts: list[str]) -> np.ndarray:
        return np.array([[word in text.split() for word in words] for text in texts], np.float32) + 0.01

    queries, positives = ["red apple", "blue fig"], ["red apple", "blue fig"]
    options: dict[str, Any] = {"num_negatives": 2, "hardening": hn.Uniform(), "model": model}
    found = hn.mine(queries, corpus, positives, not_negatives=[("red apple", "green apple"), (1, 5)], **options)
    assert {rule for _, _, rule in found.dropped_of(0)} == {"not_negatives"}
    assert [document for document, _, _ in found.dropped_of(0)] == [1, 3]
    assert 5 not in found.indices[1]
    assert found.dropped == {"not_negatives": 3}
    with pytest.raises(ValueError, match=r"not_negatives\[0\]: 'red appel' is not the text of a query"):
        hn.mine(queries, corpus, positives, not_negatives=[("red appel", "red fig")], **options)


BAD: dict[str, tuple[Any, str]] = {
    "too large": ([(0, 60)], r"not_negatives\[0\]: there is no document 60: they are numbered from 0 to 59"),
    "negative": ([(0, 1), (-1, 0)], r"not_negatives\[1\]: a row number must be from 0"),
    "three": ([(0, 1, 2)], r"not_negatives\[0\] must be a pair"),
    "a text": ([("a", 1)], r"not_negatives\[0\]: 'a' is not a row number: embeddings have no texts"),
    "floats": (torch.zeros(2, 2), "not_negatives must have an integer dtype"),
    "one column": (torch.zeros(2, dtype=torch.int64), "not_negatives must have shape"),
    "a number": (3, "not_negatives must be a file or pairs"),
    "no file": ("none.jsonl", "does not exist"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_bad_pairs_are_one_error(mistake: str) -> None:
    pairs, message = BAD[mistake]
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        mine(*exact_case(0), not_negatives=pairs)
    assert "\n" not in str(error.value)


def test_too_few_documents_are_left_is_an_error() -> None:
    vectors = torch.eye(4)
    with pytest.raises(ValueError, match="num_negatives=3, but the corpus has 2 documents"):
        hn.mine(
            vectors[:1], vectors, [0], num_negatives=3, hardening=hn.Uniform(), not_negatives=torch.tensor([[0, 2]])
        )


def test_finished_blocks_of_other_pairs_are_not_used_again(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    corpus = draw.standard_normal((300, 16)).astype(np.float32)
    np.save(tmp_path / "corpus.npy", corpus)
    np.save(tmp_path / "queries.npy", corpus[:40] + 0.5)
    rules = checked_rules(3, hn.Uniform(), (0, None), None, False, 0)
    target, file = tmp_path / "mined.jsonl", tmp_path / "pairs.jsonl"
    results = []
    for pairs in ([(0, 7)], [(0, 7), (1, 9)]):
        file.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in pairs))
        given = resumable.Input(tmp_path / "queries.npy", tmp_path / "corpus.npy", np.arange(40), not_negatives=file)
        results.append(resumable.mine_to(target, given, rules, 50_000_000, "local"))
        again = resumable.mine_to(target, given, rules, 50_000_000, "local")  # from the finished blocks
        assert torch.equal(again.indices, results[-1].indices)
        assert again.dropped_of(0) == results[-1].dropped_of(0)
    assert [found.dropped for found in results] == [{"not_negatives": 1}, {"not_negatives": 2}]
