"""Negatives chosen by a guide model, against a loop over anchors and candidates."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hardneg as hn
from hardneg.losses.kernels import strips

ROWS, TEMPERATURE = 9, 0.2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Z1, Z2, G1, G2 = draw(ROWS, 5), draw(ROWS, 5, seed=1), draw(ROWS, 3, seed=2), draw(ROWS, 3, seed=3)
SHARED, SHARED_GUIDE = draw(7, 5, seed=4), draw(7, 3, seed=5)
OWN, OWN_GUIDE = draw(ROWS, 2, 5, seed=6), draw(ROWS, 2, 3, seed=7)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def limit(positive: float, margin: float, relative: float | None) -> float:
    return positive - margin if relative is None else positive - (1 - relative) * abs(positive)


def by_loop(
    rows: list[tuple[Tensor, Tensor]], margin: float = 0.0, relative: float | None = None, beta: float = 0.0
) -> tuple[float, int]:
    """The mean loss of anchors z1 against the other rows' z2 and further rows, and the number of candidates dropped.

    rows: pairs of a shared block (N, d) or one per anchor (B, N, d) with the guide's block
    """
    losses, dropped = [], 0
    for i in range(ROWS):
        highest = limit(cosine(G1[i], G2[i]), margin, relative)
        candidates = [(Z2[j], G2[j]) for j in range(ROWS) if j != i]
        for block, guide in rows:
            mine = (block, guide) if block.dim() == 2 else (block[i], guide[i])
            candidates += list(zip(*mine, strict=True))
        kept = [cosine(Z1[i], z) / TEMPERATURE for z, g in candidates if cosine(G1[i], g) <= highest]
        dropped += len(candidates) - len(kept)
        if not kept:
            continue
        weights = [math.exp(beta * s) for s in kept]
        mean = sum(w * math.exp(s) for w, s in zip(weights, kept, strict=True)) / sum(weights)
        losses.append(math.log1p(len(kept) * mean * math.exp(-cosine(Z1[i], Z2[i]) / TEMPERATURE)))
    return sum(losses) / len(losses), dropped


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize(
    ("setting", "least"), [({}, 10), ({"margin": 0.2}, 20), ({"margin": -0.3}, 5), ({"relative": 0.7}, 10)]
)
@pytest.mark.parametrize("given", ["none", "shared", "own", "both"])
def test_candidates_that_the_guide_scores_above_the_positive_are_dropped(
    backend: str, setting: dict[str, float], least: int, given: str
) -> None:
    rows, arguments = [], {}
    sources = {"shared": (SHARED, SHARED_GUIDE), "own": (OWN, OWN_GUIDE)}
    chosen = {name: pair for name, pair in sources.items() if given in (name, "both")}
    if chosen:
        rows = list(chosen.values())
        arguments = {
            "negatives": {name: pair[0] for name, pair in chosen.items()},
            "negative_guide": {name: 3 * pair[1] for name, pair in chosen.items()},  # its length does not matter
        }
    hardening = (hn.Guided(**setting), hn.Exponential(0.5))
    loss = hn.InfoNCE(TEMPERATURE, hardening, in_batch="other", backend=backend)
    expected, dropped = by_loop(rows, beta=0.5, **setting)
    assert dropped > least
    assert float(loss(Z1, Z2, guide=(2 * G1, G2), **arguments)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_source_may_be_exempt_from_the_guide(backend: str) -> None:
    loss = hn.InfoNCE(TEMPERATURE, {"batch": hn.Guided(0.1)}, in_batch="other", backend=backend)
    everything = torch.full_like(SHARED_GUIDE, 0.0)  # cosines of 0 with every anchor, below an exempt limit or not
    low = hn.InfoNCE(TEMPERATURE, {"batch": hn.Guided(0.1), "mined": hn.Guided(-2.0)}, in_batch="other")
    found = loss(Z1, Z2, guide=(G1, G2), negatives={"mined": SHARED})
    assert_close(found, low(Z1, Z2, guide=(G1, G2), negatives={"mined": SHARED}, negative_guide={"mined": everything}))


def as_mask(options: dict[str, Any]) -> Tensor:
    """The same loss by a mask of all pairs, with the batch as given negatives."""
    unit1, unit2 = G1 / G1.norm(dim=1, keepdim=True), G2 / G2.norm(dim=1, keepdim=True)
    scores = unit1 @ unit2.T
    allowed = scores <= scores.diagonal()[:, None]
    rows = torch.arange(ROWS)
    loss = hn.InfoNCE(TEMPERATURE, in_batch=None, backend="reference", **options)
    return loss(Z1, Z2, negatives=Z2, exclude=rows, negative_mask=allowed)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize(
    "options",
    [
        {"class_prior": 0.05, "hardening": hn.Exponential(1.0)},
        {"hardening": hn.BelowPositive(0.3)},
        {"normalize": False, "hardening": hn.Threshold(score=-1.0)},
        {"normalize_weights": False, "hardening": hn.Exponential(0.5), "grad_through_weights": False},
        {"positive_in_denominator": False, "reduction": "none"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_it_fits_other_settings(options: dict[str, Any], backend: str) -> None:
    guided = {**options, "hardening": (hn.Guided(), options.get("hardening", hn.Uniform()))}
    loss = hn.InfoNCE(TEMPERATURE, in_batch="other", backend=backend, **guided)
    expected = as_mask(options)
    assert_close(loss(Z1, Z2, guide=(G1, G2)), expected)
    assert float(expected.sum()) != 0


def test_bands_by_rank_are_ranked_before_the_guide() -> None:
    """Bands intersect: the ring is that of all candidates, from which the guide drops some."""
    loss = hn.InfoNCE(TEMPERATURE, (hn.Ring(0.5, 1.0), hn.Guided()), in_batch="other", reduction="none")
    found = loss(Z1, Z2, guide=(G1, G2))
    supports = []
    for i in range(ROWS):
        scores = {j: cosine(Z1[i], Z2[j]) for j in range(ROWS) if j != i}
        ring = sorted(scores, key=scores.__getitem__)[4:]
        kept = [scores[j] / TEMPERATURE for j in ring if cosine(G1[i], G2[j]) <= cosine(G1[i], G2[i])]
        supports.append(len(kept))
        total = sum(math.exp(s) for s in kept) * math.exp(-cosine(Z1[i], Z2[i]) / TEMPERATURE)
        assert float(found[i]) == pytest.approx(math.log1p(total), rel=1e-9, abs=1e-12)
    assert 0 < sum(supports) < 4 * ROWS
    nonempty = [number for number in supports if number]
    assert loss.diagnostics()["support"] == pytest.approx(sum(nonempty) / len(nonempty))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_guide_knows_both_views_and_several_positives(backend: str) -> None:
    both = hn.InfoNCE(TEMPERATURE, hn.Guided(), backend=backend, reduction="none")(Z1, Z2, guide=(G1, G2))
    for anchor in range(2 * ROWS):
        z, g = torch.cat([Z1, Z2]), torch.cat([G1, G2])
        partner = (anchor + ROWS) % (2 * ROWS)
        highest = cosine(g[anchor], g[partner])
        others = [j for j in range(2 * ROWS) if j % ROWS != anchor % ROWS]
        kept = [cosine(z[anchor], z[j]) / TEMPERATURE for j in others if cosine(g[anchor], g[j]) <= highest]
        total = sum(math.exp(s) for s in kept) * math.exp(-cosine(z[anchor], z[partner]) / TEMPERATURE)
        assert float(both[anchor]) == pytest.approx(math.log1p(total), rel=1e-9)
    several, guides = torch.stack([Z2, -Z2], dim=1), torch.stack([G2, -G2], dim=1)
    loss = hn.InfoNCE(TEMPERATURE, hn.Guided(), in_batch=None, backend=backend)
    best = (G1 * G2).sum(dim=1).abs() / (G1.norm(dim=1) * G2.norm(dim=1))
    unit = SHARED_GUIDE / SHARED_GUIDE.norm(dim=1, keepdim=True)
    allowed = G1 / G1.norm(dim=1, keepdim=True) @ unit.T <= best[:, None]
    found = loss(Z1, several, guide=(G1, guides), negatives=SHARED, negative_guide=SHARED_GUIDE)
    plain = hn.InfoNCE(TEMPERATURE, in_batch=None, backend=backend)
    assert_close(found, plain(Z1, several, negatives=SHARED, negative_mask=allowed))
    assert not bool(allowed.all())


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_best_positive_of_the_same_label_sets_the_limit(backend: str) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, -1])
    loss = hn.InfoNCE(TEMPERATURE, hn.Guided(), supervision="full", backend=backend, reduction="none")
    found = loss(Z1, labels=labels, guide=G1)
    for i in range(ROWS - 1):
        positives = [j for j in range(ROWS) if j != i and labels[j] == labels[i]]
        highest = max(cosine(G1[i], G1[j]) for j in positives)
        others = [j for j in range(ROWS) if j != i and j not in positives]
        kept = [cosine(Z1[i], Z1[j]) / TEMPERATURE for j in others if cosine(G1[i], G1[j]) <= highest]
        total = sum(map(math.exp, kept))
        terms = [math.log1p(total * math.exp(-cosine(Z1[i], Z1[j]) / TEMPERATURE)) for j in positives]
        assert float(found[i]) == pytest.approx(sum(terms) / len(terms), rel=1e-9, abs=1e-12)


def test_a_copy_of_the_positive_is_kept() -> None:
    """Its guide score is that of the positive, within rounding, for every width."""
    for width in (3, 64, 1000):
        g1, g2 = draw(4, width, seed=8).float(), draw(4, width, seed=9).float()
        loss = hn.InfoNCE(TEMPERATURE, hn.Guided(), in_batch=None)
        z1, z2 = draw(4, 5).float(), draw(4, 5, seed=1).float()
        loss(z1, z2, guide=(g1, g2), negatives=z2[:, None], negative_guide=g2[:, None])
        assert loss.diagnostics()["support"] == 1.0
        assert loss.diagnostics()["without_candidates"] == 0


def test_gradients_are_those_of_the_kept_candidates_and_none_reach_the_guide() -> None:
    results = []
    for backend in ("reference", "tiled"):
        tensors = [x.clone().requires_grad_() for x in (Z1, Z2, SHARED, G1, G2, SHARED_GUIDE)]
        z1, z2, n, g1, g2, gn = tensors
        loss = hn.InfoNCE(TEMPERATURE, (hn.Guided(), hn.Exponential(1.0)), backend=backend)
        loss(z1, z2, guide=(g1, g2), negatives=n, negative_guide=gn).backward()
        assert [x.grad is None for x in tensors] == [False, False, False, True, True, True]
        results.append([x.grad for x in tensors[:3]])
    assert_close(results[0], results[1])

    def value(z: Tensor) -> Tensor:
        return hn.InfoNCE(TEMPERATURE, (hn.Guided(), hn.Exponential(1.0)), backend="tiled")(z, Z2, guide=(G1, G2))

    assert torch.autograd.gradcheck(value, (Z1.clone().requires_grad_(),))
    assert torch.autograd.gradgradcheck(value, (Z1.clone().requires_grad_(),))


def test_strips_of_few_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = hn.InfoNCE(TEMPERATURE, hn.Guided(), backend="tiled")
    arguments: dict[str, Any] = {"guide": (G1, G2), "negatives": OWN, "negative_guide": OWN_GUIDE}
    whole = loss(Z1, Z2, **arguments)
    monkeypatch.setitem(strips.STRIP_ELEMENTS, "cpu", 64)
    monkeypatch.setattr(strips, "LEAST_ROWS", 1)
    assert_close(loss(Z1, Z2, **arguments), whole)


def test_an_anchor_without_candidates_has_no_loss() -> None:
    loss = hn.InfoNCE(TEMPERATURE, hn.Guided(margin=3.0), in_batch="other")
    z1 = Z1.clone().requires_grad_()
    found = loss(z1, Z2, guide=(G1, G2))
    found.backward()
    assert found == 0
    assert z1.grad is not None
    assert not z1.grad.any()


GUIDED = hn.InfoNCE(TEMPERATURE, hn.Guided(), in_batch="other")


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (GUIDED, {}, r"hn.Guided needs the embeddings of a guide model: pass guide=\(g1, g2\)"),
        (hn.simcse(), {"guide": (G1, G2)}, "a guide was given, but no hardening uses it"),
        (GUIDED, {"guide": (G1,)}, "guide must have the embeddings of z1 and of z2, got 1 tensors"),
        (GUIDED, {"guide": (G1[:3], G2)}, r"guide\[0\] must have shape \(B, e\) with B = 9, got \(3, 3\)"),
        (GUIDED, {"guide": (G1, G2[:, :2])}, r"guide\[1\] must have shape \(9, 3\), got \(9, 2\)"),
        (GUIDED, {"guide": (G1, G2), "negatives": SHARED}, "needs negative_guide: pass the guide's embeddings"),
        (
            GUIDED,
            {"guide": (G1, G2), "negatives": SHARED, "negative_guide": SHARED},
            r"negative_guide must have shape \(7, 3\), got \(7, 5\)",
        ),
        (GUIDED, {"guide": (G1, G2 * torch.nan)}, r"guide\[1\]"),
        (GUIDED, {"guide": (G1.long(), G2)}, r"guide\[0\]"),
    ],
)
def test_a_guide_that_does_not_fit_gives_one_line(loss: hn.InfoNCE, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        loss(Z1, Z2, **arguments)
    assert "\n" not in str(error.value)


def test_margin_and_relative_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="give margin or relative, not both"):
        hn.Guided(margin=0.1, relative=0.9)
    with pytest.raises(ValueError, match="from_scores takes no guide"):
        GUIDED.from_scores(Z1[:, :1], Z2)
