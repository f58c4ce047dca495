"""Sets of texts: neighbors, duplicates, subsets and fingerprints."""

import pytest
import torch

from hardneg.text.text_set import TextSet


def test_neighbors_are_in_the_same_document() -> None:
    documents = [["a", "b", "c"], ["d"], ["e", "f"]]
    texts = TextSet([text for part in documents for text in part], starts=torch.tensor([0, 3, 4]))
    wanted = [
        (first + place - 1 if place else -1, first + place + 1 if place + 1 < len(part) else -1)
        for first, part in zip((0, 3, 4), documents, strict=True)
        for place in range(len(part))
    ]
    assert texts.neighbors(torch.arange(6)).tolist() == [list(pair) for pair in wanted]
    assert TextSet(["a", "b"]).neighbors(torch.tensor([1])).tolist() == [[0, -1]]


def test_equal_texts_share_an_id() -> None:
    assert TextSet(["a", "b"]).duplicates is None
    found = TextSet(["a", "b", "a", "c", "b"]).duplicates
    assert found is not None
    assert found.tolist() == [0, 1, 0, 3, 1]


def test_a_subset_has_no_neighbors_and_its_own_tokens() -> None:
    from hardneg.text.tokens import WordHashes

    texts, tokenizer = TextSet(["a", "b c", "d"], torch.tensor([0, 1, 0]), ("x", "y")), WordHashes()
    texts.tokens(tokenizer)
    part = texts.subset([2, 1])
    assert (part.texts, part.labels.tolist()) == (["d", "b c"], [0, 1])  # type: ignore[union-attr]
    assert part.tokens(tokenizer).lengths.tolist() == [1, 2]
    assert part.neighbors(torch.arange(2)).tolist() == [[-1, -1], [-1, -1]]


def test_the_fingerprint_depends_on_texts_order_labels_and_documents() -> None:
    sets = [
        TextSet(["a", "b"]),
        TextSet(["b", "a"]),
        TextSet(["ab"]),
        TextSet(["a", "b"], torch.tensor([0, 0]), ("x",)),
        TextSet(["a", "b"], starts=torch.tensor([0, 1])),
    ]
    prints = [texts.division.fingerprint for texts in sets]
    assert len(set(prints)) == len(prints)
    assert TextSet(["a", "b"]).division == sets[0].division


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one text",), "a list of texts, got one text"),
        (([],), "holds no texts"),
        ((["a"], torch.tensor([1]), ("x",)), "below the 1 classes, got 1"),
        ((["a", "b"], torch.tensor([0]), ("x",)), "labels"),
        ((["a", "b"], None, (), "t", torch.tensor([1])), "starts must rise from 0"),
    ],
)
def test_wrong_sets_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextSet(*arguments)  # type: ignore[arg-type]
