"""Queries and documents against queries and documents in one sum, and the presets for text, against loops."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn

ROWS, TEMPERATURE = 6, 0.2
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, D = draw(ROWS, 4), draw(ROWS, 4, seed=1)
OWN = draw(ROWS, 2, 4, seed=2)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def cosines(i: int, directions: tuple[str, ...]) -> Iterator[float]:
    """The cosines of row i in each direction with all other rows."""
    ends = {"query": Q, "doc": D}
    for direction in directions:
        first, second = direction.split("_to_")
        for j in range(ROWS):
            if j != i:
                yield cosine(ends[first][i], ends[second][j])


def loss_by_loop(terms: Callable[[int], list[float]], positives: Callable[[int], float], t: float) -> float:
    """Mean of −log(e^{p/t} / Z), where Z is the sum of the given terms."""
    found = [math.log(sum(terms(i))) - positives(i) / t for i in range(ROWS)]
    return sum(found) / ROWS


def positive(i: int) -> float:
    return cosine(Q[i], D[i])


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("directions", [ALL[:1], ALL[:2], ("doc_to_doc", "query_to_doc"), ALL])
def test_totals_of_directions_are_added(backend: str, directions: tuple[str, ...]) -> None:
    def terms(i: int) -> list[float]:
        repeated = 2 if "doc_to_query" in directions else 1  # GTE's sum over queries has the positive pair, too
        return repeated * [math.exp(positive(i) / TEMPERATURE)] + [
            math.exp(c / TEMPERATURE) for c in cosines(i, directions)
        ]

    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    found = hn.InfoNCE(TEMPERATURE, in_batch=directions, backend=backend)(q, d)
    assert float(found.detach()) == pytest.approx(loss_by_loop(terms, positive, TEMPERATURE), rel=1e-12)
    loss = hn.InfoNCE(TEMPERATURE, in_batch=directions, backend=backend)
    assert torch.autograd.gradcheck(loss, (q, d))


def test_query_to_doc_alone_is_the_other_view() -> None:
    options: dict[str, Any] = {"hardening": (hn.Ring(0.2, 1.0), hn.Exponential(1.0)), "reduction": "none"}
    one = hn.InfoNCE(TEMPERATURE, in_batch=("query_to_doc",), **options)
    other = hn.InfoNCE(TEMPERATURE, in_batch="other", **options)
    arguments = {"negatives": OWN, "ids": torch.tensor([1, 1, 2, 3, 4, 4])}
    assert_close(one(Q, D, **arguments), other(Q, D, **arguments))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_ids_and_hardenings_by_source_hold_in_every_direction(backend: str) -> None:
    ids = torch.tensor([[0, 10], [1, 11], [0, 12], [3, 10], [4, 1], [-1, -1]])  # of queries and documents
    ends, columns = {"query": Q, "doc": D}, {"query": 0, "doc": 1}
    dropped = 0

    def total(i: int) -> float:
        nonlocal dropped
        found = 0.0
        for first, second in (direction.split("_to_") for direction in ALL):
            scores = []
            for j in range(ROWS):
                same = ids[j, columns[second]] >= 0 and ids[j, columns[second]] in ids[i]
                dropped += int(j != i and bool(same))
                if j != i and not same:
                    scores.append(cosine(ends[first][i], ends[second][j]) / TEMPERATURE)
            weights = [math.exp(0.5 * s) for s in scores]
            mean = sum(w * math.exp(s) for w, s in zip(weights, scores, strict=True)) / sum(weights)
            found += len(scores) * mean
        return found + sum(math.exp(cosine(Q[i], z) / TEMPERATURE) for z in OWN[i])

    def terms(i: int) -> list[float]:
        return [2 * math.exp(positive(i) / TEMPERATURE), total(i)]

    loss = hn.InfoNCE(TEMPERATURE, {"batch": hn.Exponential(0.5)}, in_batch=ALL, backend=backend)
    found = loss(Q, D, negatives={"mined": OWN}, ids=ids)
    assert float(found) == pytest.approx(loss_by_loop(terms, positive, TEMPERATURE), rel=1e-12)
    assert dropped == 12


def test_gte_is_all_directions() -> None:
    assert_close(hn.gte(TEMPERATURE)(Q, D), hn.InfoNCE(TEMPERATURE, in_batch=ALL)(Q, D))
    assert hn.gte().temperature == 0.01


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_qwen3_drops_what_is_above_the_positive_by_a_margin(backend: str) -> None:
    dropped = []

    def terms(i: int) -> list[float]:
        everything = [*cosines(i, ("query_to_doc", "query_to_query", "doc_to_doc"))]
        everything += [cosine(Q[i], z) for z in OWN[i]]
        kept = [c for c in everything if c <= positive(i) + 0.1]
        dropped.append(len(everything) - len(kept))
        return [math.exp(positive(i) / 0.05), *[math.exp(c / 0.05) for c in kept]]

    expected = loss_by_loop(terms, positive, 0.05)
    assert sum(dropped) > 20
    assert sum(dropped) < ROWS * 15
    found = hn.qwen3_embedding(0.05, margin=0.1, backend=backend, reduction="none")(Q, D, negatives=OWN)
    assert float(found.mean()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gist_drops_what_the_guide_scores_above_the_positive(backend: str) -> None:
    guides = {"query": draw(ROWS, 3, seed=3), "doc": draw(ROWS, 3, seed=4)}
    ends = {"query": Q, "doc": D}
    directions = ("query_to_doc", "query_to_query", "doc_to_doc")

    def terms(i: int) -> list[float]:
        limit, found = cosine(guides["query"][i], guides["doc"][i]) - 0.05, []
        for first, second in (direction.split("_to_") for direction in directions):
            for j in range(ROWS):
                if j != i and cosine(guides[first][i], guides[second][j]) <= limit:
                    found.append(math.exp(cosine(ends[first][i], ends[second][j]) / 0.1))
        return [math.exp(positive(i) / 0.1), *found]

    assert 2 * ROWS < sum(len(terms(i)) for i in range(ROWS)) < 12 * ROWS
    loss = hn.gist(0.1, margin=0.05, backend=backend, reduction="none")
    found = loss(Q, D, guide=(guides["query"], guides["doc"]))
    assert float(found.mean()) == pytest.approx(loss_by_loop(terms, positive, 0.1), rel=1e-12)


def test_llave_weights_are_constants_in_the_denominator() -> None:
    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    similarity = torch.nn.functional.normalize(q) @ torch.nn.functional.normalize(d).T
    off = ~torch.eye(ROWS, dtype=torch.bool)
    logits = similarity / 0.1 + 9.0 * similarity.detach() * off
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(ROWS))
    found = hn.llave(9.0, 0.1)(q, d)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, (q, d)), torch.autograd.grad(expected, (q, d)))


def test_embedding_gemma_weights_own_negatives_only() -> None:
    def terms(i: int) -> list[float]:
        own = [math.exp((1 / 0.1 + 5.0) * cosine(Q[i], z)) for z in OWN[i]]
        return [math.exp(positive(i) / 0.1), *own, *[math.exp(c / 0.1) for c in cosines(i, ("query_to_doc",))]]

    found = hn.embedding_gemma(5.0, 0.1)(Q, D, negatives={"own": OWN})
    assert float(found) == pytest.approx(loss_by_loop(terms, positive, 0.1), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hn.InfoNCE(in_batch=("doc_to_doc",)), "in_batch must have 'query_to_doc'"),
        (lambda: hn.InfoNCE(in_batch=("query_to_doc",) * 2), "each direction once"),
        (lambda: hn.InfoNCE(in_batch=("query_to_dog",)), "in_batch='query_to_dog' is not known"),
        (lambda: hn.InfoNCE(in_batch="all"), "in_batch='all' is not known"),
        (lambda: hn.gte(class_prior=0.1), "class_prior=0.1 does not fit in_batch with directions"),
        (lambda: hn.gte(num_negatives=3), "num_negatives=3 does not fit"),
        (lambda: hn.gte(negative_count=3.0), "negative_count=3.0 does not fit"),
        (lambda: hn.gte(symmetric=True), "symmetric=True needs in_batch='other'"),
        (lambda: hn.gte()(Q, OWN), r"pass z2 of shape \(B, d\)"),
        (lambda: hn.llave(temperature=hn.Learnable(0.1)), "needs a temperature that is known"),
        (lambda: hn.hardness("hard"), "mode='hard' is not known"),
        (lambda: hn.hardness(hardening=hn.Ring(0.1, 1.0)), "sets the hardening"),
    ],
)
def test_mistakes_give_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
