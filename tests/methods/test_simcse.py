"""SimCSE computes the loss of its paper from two passes with different dropout, and learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.methods.simcse import SimCSE
from hardneg.text.encoders import TransformerEncoder, encode, tokenizer_of
from hardneg.text.text_set import TextSet

TEXTS = [f"{who} {what} the {where}." for who in ("a cat", "one dog", "my fox") for what in ("saw", "left")
         for where in ("mat", "house", "tree", "river")]  # fmt: skip


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 1e-3)


def made(texts: list[str] = TEXTS, objective: Any = None, encoder: nn.Module | None = None) -> SimCSE:
    torch.manual_seed(0)
    encoder = encoder or TransformerEncoder(16, layers=1, heads=2, words=500)
    head = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    module = SimCSE(encoder, head, objective or hn.simcse(), None, sgd)
    module.samples = TextSet(texts)
    return module.train()


def loop(z1: Tensor, z2: Tensor, texts: list[str], temperature: float = 0.05) -> Tensor:
    """SimCSE eq. 4, one pair at a time; equal texts are no negatives."""
    losses = []
    for i in range(len(z1)):
        scores = [torch.cosine_similarity(z1[i], z2[j], dim=0) / temperature for j in range(len(z2))]
        kept = [score for j, score in enumerate(scores) if j == i or texts[j] != texts[i]]
        losses.append(torch.stack(kept).exp().sum().log() - scores[i])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("texts", [TEXTS, [*TEXTS[:6], TEXTS[0], TEXTS[3]]], ids=["different", "with duplicates"])
def test_the_loss_is_that_of_the_paper_from_two_passes_with_dropout(texts: list[str]) -> None:
    module = made(texts).double()
    index = torch.tensor([0, 3, 5, 6, 7])
    torch.manual_seed(1)
    loss = module.training_step(index, 0)
    torch.manual_seed(1)
    tokens = module.look_up(index)
    z1, z2 = module.head(module.encoder(tokens.repeated(2))).chunk(2)
    assert not torch.allclose(z1, z2)  # dropout differs
    assert_close(loss, loop(z1, z2, [texts[row] for row in index.tolist()]))
    assert module.noted is not None
    assert_close(module.noted[1], z1.detach())


def test_training_lowers_the_loss_and_takes_texts_from_any_loader() -> None:
    module = made()
    optimizer, index = sgd(module), torch.arange(len(TEXTS))
    losses = []
    for step in range(12):
        torch.manual_seed(step)
        batch = index if step % 2 else (index, TEXTS)
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_an_encoder_without_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no dropout.*set encoder\.options\.dropout"):
        made(encoder=TransformerEncoder(16, layers=1, heads=2, words=500, dropout=0.0))


def test_a_sentence_transformer_can_be_trained(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(write_model(tmp_path / "model")), device="cpu")
    module = made(["the cat sat", "a dog ran", "the mat"], encoder=model.eval())
    tokens = module.look_up(torch.arange(3))
    assert not torch.equal(encode(model, tokens), encode(model, tokens))  # with dropout
    loss = module.training_step(torch.arange(3), 0)
    loss.backward()
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None and bool(weight.grad.any())]
    assert any("layer.1" in name for name in trained)
    model.eval()
    assert_close(
        encode(model, tokens), model.encode(module.texts().texts, convert_to_tensor=True), atol=1e-5, rtol=1e-4
    )
    assert tokenizer_of(model).max_length == 24
