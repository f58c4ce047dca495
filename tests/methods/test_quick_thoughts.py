"""Quick-thoughts computes the softmax over the batch of its paper, without a sentence as its own candidate."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.methods.quick_thoughts import QuickThoughts
from hardneg.text.encoders import GRUEncoder, TwoEncoders
from hardneg.text.text_set import TextSet

TEXTS = [f"sentence number {number} of {number % 3}" for number in range(20)]


def made(texts: TextSet, **objective: object) -> QuickThoughts:
    torch.manual_seed(0)
    encoder = TwoEncoders(GRUEncoder(8, 6, 300), GRUEncoder(8, 6, 300))
    options = {"in_batch": None, "normalize": False, "temperature": 1.0, **objective}
    module = QuickThoughts(
        encoder, nn.Identity(), hn.InfoNCE(**options), None, lambda m: torch.optim.Adam(m.parameters(), 1e-2)
    )  # type: ignore[arg-type]
    module.samples = texts
    return module.double().train()


def scores_of(module: QuickThoughts, texts: list[str]) -> Tensor:
    """f(x)·g(y) of all pairs of texts, (N, N)."""
    tokens = TextSet(texts).token_batch(torch.arange(len(texts)), module.encoder.tokenizer)
    return module.encoder.first(tokens) @ module.encoder.second(tokens).T


def published(scores: Tensor) -> Tensor:
    """The loss of Logeswaran & Lee 2018 of a whole document, with the diagonal masked: softmax cross-entropy with equal
    targets for the sentences before and after."""
    size = len(scores)
    targets = torch.diag(torch.ones(size - 1), 1) + torch.diag(torch.ones(size - 1), -1)
    targets = (targets / targets.sum(dim=1, keepdim=True)).to(scores)
    masked = scores.masked_fill(torch.eye(size, dtype=torch.bool), -torch.inf)
    return -(targets * masked.log_softmax(dim=1).masked_fill(targets == 0, 0)).sum(dim=1).mean()


def test_a_whole_document_gives_the_softmax_cross_entropy_of_the_paper() -> None:
    module = made(TextSet(TEXTS), combine_positives="in_denominator")
    assert_close(module.training_step(torch.arange(20), 0), published(scores_of(module, TEXTS)))


@pytest.mark.parametrize("index", [[3, 4, 5, 6], [0, 7, 19, 12], [19]], ids=["consecutive", "scattered", "one"])
def test_any_batch_compares_with_the_batch_and_its_neighbors(index: list[int]) -> None:
    documents = torch.tensor([0, 5, 13])
    module = made(TextSet(TEXTS, starts=documents))
    scores = scores_of(module, TEXTS)
    document = [sum(row >= int(start) for start in documents) for row in range(20)]

    def neighbors(row: int) -> list[int]:
        return [near for near in (row - 1, row + 1) if 0 <= near < 20 and document[near] == document[row]]

    context = sorted({near for row in index for near in (row, *neighbors(row))})
    losses = []
    for row in index:
        negatives = [scores[row, other] for other in context if other != row and other not in neighbors(row)]
        if not negatives:
            continue
        total = torch.stack(negatives).exp().sum()
        terms = [(scores[row, near].exp() + total).log() - scores[row, near] for near in neighbors(row)]
        losses.append(torch.stack(terms).mean())
    wanted = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
    assert_close(module.training_step(torch.tensor(index), 0), wanted)


def test_equal_texts_are_no_negatives() -> None:
    texts = [*TEXTS[:5], TEXTS[0], TEXTS[9]]
    module = made(TextSet(texts))
    scores = scores_of(module, texts)
    loss = module.training_step(torch.tensor([0]), 0)  # context: 0 and 1, so there is no negative
    assert float(loss.detach()) == 0.0
    found = module.training_step(torch.tensor([0, 5]), 0)  # context: 0, 1, 4, 5, 6
    one = torch.stack([scores[0, 4], scores[0, 6]]).exp().sum()  # not 5, which equals 0
    other = scores[5, 1].exp()
    terms = [(scores[0, 1].exp() + one).log() - scores[0, 1]]
    terms.append(torch.stack([(scores[5, near].exp() + other).log() - scores[5, near] for near in (4, 6)]).mean())
    assert_close(found, torch.stack(terms).mean())


def test_hard_and_debiased_losses_train() -> None:
    for objective in (
        {"hardening": hn.Exponential(1.0), "weight_range": 2.0},
        {"class_prior": 0.1, "weight_range": 2.0},
    ):
        module = made(TextSet(TEXTS), **objective)
        optimizer, losses = module._optimizer(module), []
        for _ in range(40):
            loss = module.training_step(torch.arange(20), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] - 0.1


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="in_batch=None, not 'both'"):
        made(TextSet(TEXTS), in_batch="both")
    with pytest.raises(ValueError, match="needs TwoEncoders, got GRUEncoder"):
        QuickThoughts(GRUEncoder(8, 6, 30), nn.Identity(), hn.moco(), None, lambda m: m)
