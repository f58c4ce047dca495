"""The losses of the plug-in against those of sentence-transformers, on the same model and texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import gather_processes
from integrations.tiny_model import WORDS, sentences, tiny_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.integrations.sentence_transformers import CachedHardNegativeLoss, HardNegativeLoss

BATCH = 7
BOTH: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    return tiny_model(tmp_path_factory.mktemp("model")).double()  # float32 rounds to 1e-6


def columns(number: int) -> list[list[str]]:
    """Columns of different texts."""
    texts = sentences(number * BATCH)
    return [texts[start::number] for start in range(number)]


def features(model: SentenceTransformer, texts: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    return [model.preprocess(list(column)) for column in texts]


def gradients(model: nn.Module, loss: nn.Module, texts: Sequence[Sequence[str]], factor: float = 1.0) -> list[Tensor]:
    """The loss, and the gradients of the model and of the loss's own parameters."""
    loss.zero_grad(set_to_none=True)
    value = loss(features(model, texts), None)
    (factor * value).backward()
    return [value.detach(), *[p.grad.clone() for p in loss.parameters() if p.grad is not None]]


def assert_same(model: SentenceTransformer, ours: nn.Module, theirs: nn.Module, texts: Sequence[Sequence[str]]) -> None:
    expected, found = gradients(model, theirs, texts), gradients(model, ours, texts)
    assert len(expected) > 10
    assert max(float(g.abs().max()) for g in expected[1:]) > 1e-3  # the gradient is not zero
    assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    assert_close(found[1:], expected[1:], rtol=0, atol=1e-6)  # version 6.0 keeps cached gradients in float32


@pytest.mark.parametrize("number", [2, 3, 5])
def test_the_default_is_multiple_negatives_ranking(model: SentenceTransformer, number: int) -> None:
    assert_same(model, HardNegativeLoss(model), MultipleNegativesRankingLoss(model), columns(number))


@pytest.mark.parametrize("number", [2, 4])
def test_the_symmetric_loss_is_that_of_both_directions(model: SentenceTransformer, number: int) -> None:
    ours = HardNegativeLoss(model, symmetric=True)
    assert_same(model, ours, MultipleNegativesRankingLoss(model, **BOTH), columns(number))
    assert_same(model, ours, CachedMultipleNegativesRankingLoss(model, mini_batch_size=3, **BOTH), columns(number))


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("number", [2, 4])
def test_hardness_modes_are_tilts_by_source(model: SentenceTransformer, mode: Any, number: int) -> None:
    hardness: dict[str, Any] = {"hardness_mode": mode, "hardness_strength": 9.0}
    loss = hn.hardness(mode, 9.0, temperature=0.05)
    theirs = MultipleNegativesRankingLoss(model, **hardness)
    assert_same(model, HardNegativeLoss(model, loss), theirs, columns(number))
    cached = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4, **hardness)
    assert_same(model, CachedHardNegativeLoss(model, loss, mini_batch_size=3), cached, columns(number))
    if mode != "hard_negatives" or number > 2:  # without explicit negatives that mode changes nothing
        plain = MultipleNegativesRankingLoss(model)(features(model, columns(number)), None)
        assert abs(float((theirs(features(model, columns(number)), None) - plain).detach())) > 1e-3


def test_gte_is_the_joint_loss_of_all_directions(model: SentenceTransformer) -> None:
    directions: Any = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    theirs = MultipleNegativesRankingLoss(model, directions=directions)
    assert_same(model, HardNegativeLoss(model, hn.gte(0.05)), theirs, columns(2))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["same tokens", "other tokens"])
@pytest.mark.parametrize("margin", [("absolute", 0.02), ("relative", 0.05)], ids=str)
def test_gist_is_their_loss_with_a_guide(
    model: SentenceTransformer, tmp_path: Path, number: int, shared: bool, margin: tuple[Any, float]
) -> None:
    guide = tiny_model(tmp_path, words=None if shared else WORDS[::-1], seed=1).double()
    kind, size = margin
    theirs = GISTEmbedLoss(model, guide, temperature=0.05, margin_strategy=kind, margin=size)
    # Their mean counts anchors without negatives, ours leaves them out.
    loss = hn.gist(0.05, **({"margin": size} if kind == "absolute" else {"relative": 1 - size}), reduction="sum")
    ours = HardNegativeLoss(model, loss, guide=guide)
    expected, found = (run(features(model, columns(number)), None).detach() for run in (theirs, ours))
    assert_close(found / BATCH, expected, rtol=0, atol=1e-9)
    support = loss.diagnostics()["support"]
    assert 1 < support < (3 * (BATCH - 1) + (BATCH if number == 3 else 0)) - 1  # the guide drops some
    cached = CachedHardNegativeLoss(model, loss, guide=guide, mini_batch_size=3)
    assert_close(cached(features(model, columns(number))).detach() / BATCH, expected, rtol=0, atol=1e-9)
    assert not any(name.startswith("guide") or "_guide" in name for name, _ in ours.named_parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_cached_gradients_equal_the_uncached_ones(tmp_path: Path, dropout: float) -> None:
    model = tiny_model(tmp_path, dropout)
    model.train()
    texts = columns(4)
    tilted = hn.InfoNCE(0.1, hn.Exponential(0.5), class_prior=0.05, in_batch="other")
    cached = CachedHardNegativeLoss(model, tilted, mini_batch_size=BATCH)  # one mini-batch: the same dropout
    torch.manual_seed(3)
    found = gradients(model, cached, texts, factor=0.5)
    torch.manual_seed(3)
    # Per column, as the cached loss encodes them: columns that are encoded together draw other dropout.
    embeddings = [model(column)["sentence_embedding"] for column in features(model, texts)]
    plain = HardNegativeLoss(model, tilted)
    model.zero_grad()
    value = plain.compute_loss_from_embeddings(embeddings)
    (0.5 * value).backward()
    assert_close(found[0], value.detach())
    assert_close(found[1:], [p.grad for p in model.parameters() if p.grad is not None])


def test_a_learned_temperature_gets_the_same_gradient_from_the_cached_loss(model: SentenceTransformer) -> None:
    texts = columns(3)
    losses = [hn.simcse(hn.Learnable(0.07)) for _ in range(2)]
    expected = gradients(model, HardNegativeLoss(model, losses[0]), texts, factor=0.25)
    found = gradients(model, CachedHardNegativeLoss(model, losses[1], mini_batch_size=2), texts, factor=0.25)
    (learned,) = losses[0].parameters()
    assert float(learned.grad.abs()) > 1e-3  # type: ignore[union-attr]
    assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
def test_it_works_inside_matryoshka_loss(model: SentenceTransformer, cached: bool) -> None:
    inner: tuple[nn.Module, nn.Module]
    if cached:
        inner = (
            CachedHardNegativeLoss(model, mini_batch_size=3),
            CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
        )
    else:
        inner = HardNegativeLoss(model), MultipleNegativesRankingLoss(model)
    ours, theirs = (MatryoshkaLoss(model, loss, [16, 8, 4], [1.0, 0.5, 0.25]) for loss in inner)
    assert_same(model, ours, theirs, columns(3))


def test_a_learned_temperature_in_a_cached_matryoshka_loss_is_refused(model: SentenceTransformer) -> None:
    loss = MatryoshkaLoss(model, CachedHardNegativeLoss(model, hn.simcse(hn.Learnable(0.07))), [16, 8])
    with pytest.raises(ValueError, match="learnable temperature would get wrong gradients"):
        loss(features(model, columns(2)), None)


def by_loop(anchors: Tensor, positives: Tensor, negatives: Sequence[Sequence[Tensor]]) -> Tensor:
    """InfoNCE at temperature .05 of rows, each with its own list of negatives."""
    losses = []
    for anchor, positive, chosen in zip(anchors, positives, negatives, strict=True):
        scores = torch.cosine_similarity(anchor[None], torch.stack([positive, *chosen])) / 0.05
        losses.append(torch.logsumexp(scores, 0) - scores[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("hardening", [hn.Uniform(), {"own": hn.Uniform()}], ids=["one", "by source"])
@pytest.mark.parametrize("cached", [False, True])
def test_equal_texts_are_no_negatives(model: SentenceTransformer, hardening: Any, cached: bool) -> None:
    anchor, positive, negative = columns(3)
    positive[3] = positive[0]  # two anchors with one positive
    anchor[4] = positive[1]  # an anchor that is another row's positive
    negative[2] = positive[2]  # a wrong hard negative
    negative[5] = positive[6]
    texts = [anchor, positive, negative]
    loss = hn.simcse(0.05, hardening=hardening)
    ours = CachedHardNegativeLoss(model, loss, mini_batch_size=2) if cached else HardNegativeLoss(model, loss)
    za, zp, zn = (torch.as_tensor(model.encode(column)) for column in texts)
    allowed = []
    for row in range(BATCH):
        own = {anchor[row], positive[row]}
        others = [zp[j] for j in range(BATCH) if j != row and positive[j] not in own]
        allowed.append(others + [zn[j] for j in range(BATCH) if negative[j] not in own])
    assert sorted(map(len, allowed)) == [12, 12, 12, 12, 12, 13, 13]
    assert_close(ours(features(model, texts)).detach(), by_loop(za, zp, allowed))
    unmasked = HardNegativeLoss(model, loss, mask_duplicates=False)(features(model, texts))
    assert_close(unmasked, MultipleNegativesRankingLoss(model)(features(model, texts), None))


@pytest.mark.parametrize("hardening", [hn.Uniform(), {"own": hn.Uniform()}], ids=["one", "by source"])
@pytest.mark.parametrize("in_batch", ["other", None])
def test_rows_may_have_different_numbers_of_negatives(
    model: SentenceTransformer, hardening: Any, in_batch: Any
) -> None:
    texts = columns(4)
    for column, row in ((2, 1), (3, 1), (3, 4), (2, 5)):
        texts[column][row] = ""
    ours = HardNegativeLoss(model, hn.simcse(0.05, hardening=hardening, in_batch=in_batch))
    z = [torch.as_tensor(model.encode(column)) for column in texts]
    allowed = []
    for row in range(BATCH):
        rows = [row] if in_batch is None else range(BATCH)
        chosen = [z[column][j] for column in (2, 3) for j in rows if texts[column][j]]
        allowed.append(chosen + ([] if in_batch is None else [z[1][j] for j in range(BATCH) if j != row]))
    if in_batch is None:  # an anchor without negatives is left out of the mean
        kept = [row for row in range(BATCH) if allowed[row]]
        assert len(kept) == BATCH - 1
        z, allowed = [column[kept] for column in z], [allowed[row] for row in kept]
    found = ours(features(model, texts)).detach()
    assert_close(found, by_loop(z[0], z[1], allowed))


def test_a_column_with_labels_takes_a_supervised_loss(model: SentenceTransformer) -> None:
    (texts,), labels = columns(1), torch.tensor([0, 1, 0, 1, 2, 2, 0])
    ours = HardNegativeLoss(model, hn.supcon(0.1))
    expected = hn.supcon(0.1)(torch.as_tensor(model.encode(texts)), labels=labels)
    assert_close(ours(features(model, [texts]), labels).detach(), expected)


def test_parts_add_up_to_the_loss(model: SentenceTransformer) -> None:
    parts = HardNegativeLoss(model, symmetric=True, parts=True)(features(model, columns(3)))
    whole = HardNegativeLoss(model, symmetric=True)(features(model, columns(3)))
    assert isinstance(parts, dict)
    assert list(parts) == ["query_to_doc", "doc_to_query"]
    assert_close(parts["query_to_doc"] + parts["doc_to_query"], whole)


def test_the_model_card_gets_every_setting(model: SentenceTransformer) -> None:
    loss = CachedHardNegativeLoss(model, hn.simcse(0.05, hardening=hn.Ring(0.5, 1.0)), mini_batch_size=4)
    config = loss.get_config_dict()
    assert config["hardening"] == "(Ring(lower=0.5, upper=1.0),)"
    assert (config["temperature"], config["mini_batch_size"], config["gather_across_devices"]) == (0.05, 4, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.CrossEntropyLoss()}, "loss must be an hn.InfoNCE or one of its presets, got CrossEntropyLoss"),
        ({"loss": hn.simcse(reduction="none")}, "reduction='none', but training needs one number"),
        ({"loss": hn.simclr(), "symmetric": True}, "symmetric=True needs a loss with in_batch='other'"),
        ({"loss": hn.clip(), "symmetric": True}, "symmetric=True needs a loss with in_batch='other'"),
        ({"mask_duplicates": "yes"}, "mask_duplicates"),
        ({"loss": hn.gist()}, r"hn\.Guided needs a guide model, .*: pass guide=SentenceTransformer"),
        ({"loss": hn.simcse(hardening={"own": hn.Guided()})}, "pass guide=SentenceTransformer"),
        ({"guide": nn.Identity()}, "a guide model needs .*: add it to the loss, or leave guide out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HardNegativeLoss(nn.Identity(), **options)


@pytest.mark.parametrize("made", [HardNegativeLoss, CachedHardNegativeLoss])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([hn.simcse(0.05)], {}, r"takes the model before the loss: \w+\(model, loss\)"),
        ([nn.Identity()], {"scale": 20}, r"has no argument 'scale': .*pass hn\.simcse\(1 / 20\)"),
        ([nn.Identity()], {"symetric": True}, "did you mean symmetric"),
    ],
)
def test_arguments_of_another_loss_are_named(
    made: type[HardNegativeLoss], arguments: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        made(*arguments, **options)


def test_static_embeddings_are_refused_by_the_cached_loss(tmp_path: Path) -> None:
    """Their tokens are in one row, so mini-batches of it would read beyond its end."""
    rows = StaticEmbedding(tiny_model(tmp_path).tokenizer, embedding_dim=8)
    static = SentenceTransformer(modules=[rows], device="cpu")
    with pytest.raises(ValueError, match=r"static embeddings .* cannot be split into mini-batches"):
        CachedHardNegativeLoss(static)


def test_static_embeddings_mask_duplicates_and_empty_texts(tmp_path: Path) -> None:
    rows = StaticEmbedding(tiny_model(tmp_path).tokenizer, embedding_dim=8)
    static = SentenceTransformer(modules=[rows], device="cpu")
    texts = columns(3)
    expected = MultipleNegativesRankingLoss(static)(features(static, texts), None)
    assert_close(HardNegativeLoss(static)(features(static, texts)), expected)
    assert_close(HardNegativeLoss(static, mask_duplicates=False)(features(static, texts)), expected)
    texts[2][0] = texts[0][1]  # a negative that is the anchor of another row
    texts[2][1] = ""
    z = static.encode([text for column in texts for text in column], convert_to_tensor=True)
    z1, z2, given = torch.nn.functional.normalize(z).split(len(texts[0]))
    scores = torch.cat([z1 @ z2.T, z1 @ given.T], dim=1) / 0.05
    out = torch.zeros_like(scores, dtype=torch.bool)
    out[:, len(z1) + 1] = True  # the empty text
    out[1, len(z1)] = True  # the anchor's own text
    wanted = torch.nn.functional.cross_entropy(scores.masked_fill(out, -torch.inf), torch.arange(len(z1)))
    assert_close(HardNegativeLoss(static)(features(static, texts)), wanted)
    assert not torch.isclose(wanted, expected, atol=1e-3)


def test_a_supervised_loss_asks_for_a_column_of_labels(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="add a column 'label'"):
        HardNegativeLoss(model, hn.supcon(0.05))(features(model, columns(2)), None)


def test_a_symmetric_loss_with_negatives_is_refused(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="pass symmetric=True to HardNegativeLoss instead"):
        HardNegativeLoss(model, hn.clip())(features(model, columns(3)))


def test_inputs_without_tokens_need_no_masking_of_duplicates() -> None:
    class Rows(nn.Module):
        def forward(self, column: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": column["sentence_embedding"]}

    rows = [{"sentence_embedding": torch.randn(5, 4)} for _ in range(3)]
    with pytest.raises(ValueError, match="pass mask_duplicates=False"):
        HardNegativeLoss(Rows())(rows)
    found = HardNegativeLoss(Rows(), mask_duplicates=False)(rows)
    z = [row["sentence_embedding"] for row in rows]
    assert_close(found, hn.simcse()(z[0], z[1], negatives=z[2]))


@pytest.mark.slow
def test_two_processes_compute_the_gradient_of_one(tmp_path: Path) -> None:
    ranks = gather_processes.launch(tmp_path)
    model = tiny_model(tmp_path / "model").double()
    for name, loss in gather_processes.losses(model, gather=False).items():
        expected = gather_processes.gradients(model, loss, slice(None))
        for found in ranks:
            assert_close(found[name], expected)


def test_a_model_without_pooling_gives_one_line(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="the model returns no sentence_embedding: add a Pooling module"):
        HardNegativeLoss(model[0])(features(model, columns(2)))


def test_texts_cut_to_the_same_tokens_are_equal(model: SentenceTransformer) -> None:
    """Their embeddings are equal, so they must not be negatives of each other."""
    anchor, positive = columns(2)
    long = " ".join(WORDS[:30])
    positive[0], positive[1] = long, long + " w1 w2"
    loss = HardNegativeLoss(model)
    loss(features(model, [anchor, positive]))
    assert loss.loss.diagnostics()["support"] == pytest.approx((5 * (BATCH - 1) + 2 * (BATCH - 2)) / BATCH)


def test_one_pair_alone_has_no_loss(model: SentenceTransformer) -> None:
    value = HardNegativeLoss(model)(features(model, [["w1 w2"], ["w3"]]))
    assert isinstance(value, Tensor)
    assert value.detach() == 0


def test_in_float32_the_loss_agrees_to_rounding(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    expected = MultipleNegativesRankingLoss(model)(features(model, columns(3)), None)
    assert_close(HardNegativeLoss(model)(features(model, columns(3))), expected, rtol=1e-6, atol=1e-6)
