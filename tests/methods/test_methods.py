"""Methods compute the equations of their papers, and refuse settings that do not fit."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import steps
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn
from hardneg.images import ImageSet
from hardneg.memory import Clusters, MemoryBank
from hardneg.memory.clustered_bank import ClusteredBank
from hardneg.methods.instance_discrimination import InstanceDiscrimination
from hardneg.methods.local_aggregation import LocalAggregationMethod
from hardneg.methods.moco import MoCo
from hardneg.methods.moco_v3 import MoCoV3, annealed
from hardneg.training import build, recipe

BATCHES = torch.arange(48).view(3, 16)


def unit(vectors: Tensor) -> Tensor:
    return nn.functional.normalize(vectors, dim=-1)


@torch.no_grad()
def test_moco_v3_is_both_directions_times_twice_the_temperature() -> None:
    module = steps.made("mocov3", "objective.temperature=0.3")
    assert isinstance(module, MoCoV3)
    views = steps.first_views(module, BATCHES[0])
    queries = unit(module.predictor(module.head(module.encoder(views)))).chunk(2)
    keys = unit(module.key_head(module.key_encoder(views))).chunk(2)
    expected = 0.0
    for query, key in ((queries[0], keys[1]), (queries[1], keys[0])):
        expected += float(nn.functional.cross_entropy(query @ key.T / 0.3, torch.arange(16))) * 2 * 0.3
    assert float(module.loss(views, BATCHES[0], None)) == pytest.approx(expected, rel=1e-5)


def test_the_momentum_of_moco_v3_rises_to_one_along_a_cosine() -> None:
    values = [annealed(0.99, step / 100) for step in range(101)]
    assert values[0] == pytest.approx(0.99)
    assert values[-1] == 1.0
    assert all(one <= other for one, other in itertools.pairwise(values))
    assert values[25] == pytest.approx(1 - 0.01 * (1 + math.cos(math.pi / 4)) / 2)


@torch.no_grad()
def test_instance_discrimination_is_a_softmax_over_the_bank() -> None:
    module = steps.made("ir")
    assert isinstance(module, InstanceDiscrimination)
    views = steps.first_views(module, BATCHES[1])
    assert len(views) == 16  # one view
    z = unit(module.head(module.encoder(views)))
    expected = nn.functional.cross_entropy(z @ module.memory.bank.rows.T / 0.2, BATCHES[1])
    assert_close(module.loss(views, BATCHES[1], None), expected)


def test_local_aggregation_is_instance_discrimination_until_clusters_are_fitted() -> None:
    la, ir = steps.made("la", "memory.clusters=4", "memory.cluster_after=1"), steps.made("ir")
    assert isinstance(la, LocalAggregationMethod)
    for batch in BATCHES:  # an epoch
        assert steps.step(la, batch) == steps.step(ir, batch)
        assert la.memory.clusters is not None
        assert la.memory.clusters.fitted_at is None
    value = steps.loss(la, BATCHES[0])
    assert la.memory.clusters is not None
    assert la.noted is not None
    assert la.memory.clusters.fitted_at == 3
    with torch.no_grad():
        scores = (unit(la.noted[1]) @ la.memory.bank.rows.T / 0.2).exp()  # (B, N); the background is the whole bank
        close = la.memory.clusters.same(BATCHES[0])
        expected = -((scores * close).sum(1) / close.sum(1) / scores.mean(1)).log().mean()
    assert_close(value, expected, rtol=1e-4, atol=1e-4)
    assert la.diagnostics()["support"] == steps.SIZE - 1


def test_clusters_are_fitted_at_the_epochs_of_the_settings() -> None:
    module = steps.made("ir", "memory={clusters: 3, close: negatives, cluster_after: 2, cluster_every: 2}")
    assert isinstance(module, InstanceDiscrimination)
    assert module.memory.clusters is not None
    fitted = []
    for number in range(18):
        steps.step(module, BATCHES[number % 3])
        fitted.append(module.memory.clusters.fitted_at)
    assert fitted == [None] * 6 + [6] * 6 + [12] * 6


def test_cave_takes_negatives_only_from_the_cluster_of_the_anchor() -> None:
    module = steps.made("ir", "memory={clusters: 3, close: negatives, cluster_after: 0}")
    assert isinstance(module, InstanceDiscrimination)
    steps.loss(module, BATCHES[0])
    terms, clusters = module.memory.loss_arguments(BATCHES[0], 0), module.memory.clusters
    assert clusters is not None
    for anchor in range(16):
        for row in range(steps.SIZE):
            together = clusters.assignments[0, anchor] == clusters.assignments[0, row]
            assert bool(terms["negative_mask"][anchor, row]) == bool(together)


@torch.no_grad()
def test_ring_with_close_positives_is_the_log_of_their_mean() -> None:
    ring = "objective={preset: ring_nce, temperature: 0.2, lower: 0.5, upper: 0.9, anneal: none}"
    module = steps.made("ir", ring, "memory={clusters: 3, close: positives, cluster_after: 0}")
    assert isinstance(module, InstanceDiscrimination)
    value = float(steps.loss(module, BATCHES[0]))
    assert module.noted is not None
    assert module.memory.clusters is not None
    losses = []
    for anchor, z in zip(BATCHES[0].tolist(), unit(module.noted[1]), strict=True):
        scores = (module.memory.bank.rows @ z / 0.2).double()
        same = module.memory.clusters.assignments[0] == module.memory.clusters.assignments[0, anchor]
        others = torch.cat([scores[:anchor], scores[anchor + 1 :]]).sort().values
        ring_of = others[int(0.5 * 47 + 1e-9) : int(0.9 * 47 + 1e-9)]
        losses.append(math.log(1 + float(ring_of.exp().sum() / scores[same].exp().mean())))
    assert value == pytest.approx(sum(losses) / 16, rel=1e-4)


@given(k=st.integers(1, 12), repeats=st.integers(1, 3), most=st.integers(1, 9), step=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_close_positives_are_the_anchors_row_and_distinct_cluster_members(
    k: int, repeats: int, most: int, step: int
) -> None:
    from hardneg.memory import clustered_bank

    memory = ClusteredBank(MemoryBank(30, 4, seed=step), Clusters(k, repeats, backend="torch"), "positives")
    memory.refresh(0)
    idx = torch.tensor([0, 7, 29, 7])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustered_bank, "MAX_CLUSTER_POSITIVES", most)
        chosen = memory.positives(idx, step)
        again = memory.positives(idx[:2], step)
    assert memory.clusters is not None
    for row, anchor in zip(chosen.tolist(), idx.tolist(), strict=True):
        taken = [member for member in row if member >= 0]
        members = set(memory.clusters.same(torch.tensor([anchor]))[0].nonzero()[:, 0].tolist())
        assert row[0] == anchor
        assert len(set(taken)) == len(taken)
        assert set(taken) <= members
        assert len(taken) == 1 + min(most, len(members) - 1)
    # The positives of an anchor do not depend on the rest of the batch.
    for row, other in zip(chosen.tolist(), again.tolist(), strict=False):
        assert {m for m in row if m >= 0} == {m for m in other if m >= 0}


@pytest.mark.parametrize("name", ["moco", "ir", "cmc"])
@pytest.mark.parametrize("preset", ["moco", "hcl", "debiased", "decoupled", "ring_nce", "hscl", "hscl_threshold"])
def test_every_objective_trains_with_every_memory(name: str, preset: str) -> None:
    split = ["memory.split=4"] if name == "moco" else []
    module = steps.made(name, f"objective={{preset: {preset}, temperature: 0.3}}", *split)
    for batch in BATCHES:
        assert math.isfinite(steps.step(module, batch))


@pytest.mark.parametrize("name", ["ir", "cmc"])
@pytest.mark.parametrize("close", ["negatives", "positives"])
@pytest.mark.parametrize("preset", ["instance_discrimination", "ring_nce", "hcl"])
def test_cave_and_close_positives_train_with_every_bank(name: str, close: str, preset: str) -> None:
    memory = f"memory={{clusters: 3, repeats: 2, close: {close}, cluster_after: 1}}"
    module = steps.made(name, f"objective={{preset: {preset}, temperature: 0.3}}", memory)
    for batch in torch.cat([BATCHES, BATCHES]):
        assert math.isfinite(steps.step(module, batch))


def test_drawn_negatives_depend_on_the_step_alone() -> None:
    one, other = (steps.made("ir", "objective.num_negatives=5") for _ in range(2))
    torch.manual_seed(1)
    first = steps.loss(one, BATCHES[0])
    torch.manual_seed(2)
    assert torch.equal(first, steps.loss(other, BATCHES[0]))


def test_labels_are_queued_and_exclude_negatives_of_the_same_class() -> None:
    module = steps.made("moco", "objective={preset: scl, temperature: 0.3}", "memory={queue: 40, split: 4}")
    assert isinstance(module, MoCo)
    steps.step(module, BATCHES[0])
    labels = steps.digits().labels
    assert labels is not None
    assert torch.equal(module.queue.labels, labels[:16])
    steps.loss(module, BATCHES[1])
    differ = (labels[16:32, None] != labels[:16]).sum(dim=1).double().mean()
    assert module.diagnostics()["support"] == pytest.approx(float(differ))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("moco", ["objective={preset: simclr, in_batch: both}"], "keys are not anchors"),
        ("moco", ["memory.split=5"], "memory.split=5 does not divide a batch of 16"),
        ("moco", ["memory.momentum=1.5"], "momentum must be"),
        ("mocov3", ["objective={preset: simclr, in_batch: both}"], "in_batch='other'"),
        ("ir", ["objective.in_batch=other"], "in_batch=None"),
        ("ir", ["memory.close=negatives"], "needs clusters"),
        ("ir", ["memory.close=near", "memory.clusters=3"], "close='near' is not known"),
        ("cmc", ["views.options.mean=[0.5]", "views.options.std=[0.5]"], "leave mean and std out"),
        ("la", ["memory.clusters=0"], "set memory.clusters"),
        ("la", ["objective.preset=scl"], "uses no labels"),
        ("ir", ["method=instance_discriminatio"], "did you mean 'instance_discrimination'"),
    ],
)
def test_settings_that_do_not_fit_the_method_are_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        steps.made(name, *overrides)


def test_ddp_sends_no_memory_from_process_to_process() -> None:
    for name in ("la", "moco"):
        module = steps.made(name)
        memory = {"memory.bank.rows", "memory.clusters.assignments", "queue.key_store", "queue.label_store"}
        assert memory & module.state_dict().keys()
        assert not memory & dict(module.named_buffers()).keys()  # DDP broadcasts buffers


def test_moco_ring_is_moco_with_another_objective() -> None:
    moco, ring = (recipe.load(recipe.find("digits-moco"), [f"objective.preset={p}"]) for p in ("moco", "ring_nce"))
    assert isinstance(build.loss(moco).hardening[0], hn.Uniform)
    assert isinstance(build.loss(ring).hardening[0], hn.Ring)
    hard = build.loss(recipe.load(recipe.find("cifar10-moco-hcl")))
    assert (hard.in_batch, hard.class_prior, hard.hardening[0].at(0.0).tilt()) == (None, 0.0, 0.2)


@pytest.mark.parametrize(
    "name", ["cifar10-ir", "cifar10-cmc", "cifar10-la", "cifar10-moco", "cifar10-moco-hcl", "cifar10-mocov3"]
)
def test_recipes_of_the_papers_train_on_color_images(name: str) -> None:
    """With a small network and few images; clusters are fitted after the first epoch."""
    small = ["encoder.name=tiny", "encoder.options={}", "trainer.batch_size=16"]
    clusters = [] if "moco" in name else ["memory.clusters=3", "memory.cluster_after=1"]
    settings = recipe.load(recipe.find(name), [*small, *clusters])
    images = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8)
    module = build.method(settings, ImageSet(images))
    module._trainer, module.total_steps = steps.FakeTrainer(), 100  # type: ignore[assignment]
    for batch in torch.arange(32).view(2, 16).repeat(2, 1):
        assert math.isfinite(steps.step(module.train(), batch))
    made = settings.kind.views(settings.views, (3, 32, 32)).plain(images[:2])
    assert module.encoder.eval()(made).shape == (2, 256 if name == "cifar10-cmc" else 128)


def test_views_without_optional_arguments_are_laid_out_channels_last_by_the_method() -> None:
    def plain(images: Tensor, generator: torch.Generator, views: int = 2) -> Tensor:
        return images.float().repeat(views, 1, 1, 1)

    module = steps.made("simclr")
    made = type(module)(module.encoder, module.head, module.objective, plain, lambda m: None, channels_last=True)
    views = made.make_views(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 4, torch.device("cpu"), 0)
    assert views.shape == (8, 3, 8, 8)
    assert views.is_contiguous(memory_format=torch.channels_last)
