"""Candidates excluded by their ids, against a loop over all pairs; and the memory that takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor

import hardneg as hn
from hardneg.losses.kernels import strips
from hardneg.losses.kernels.identities import Identities, related


def expected(own: Tensor, anchors: Tensor, candidates: Tensor, pairs: Tensor) -> list[list[bool]]:
    """Which candidates (A, N) are no negatives, by the definition."""
    known = {(a, b) for a, b in pairs.tolist()} | {(b, a) for a, b in pairs.tolist()}
    return [
        [c != -1 and (c in ids or (anchor, c) in known) for c in row]
        for ids, anchor, row in zip(own.tolist(), anchors.tolist(), candidates.tolist(), strict=True)
    ]


def test_masks_agree_with_a_loop() -> None:
    excluded = 0

    @settings(max_examples=100, deadline=None)
    @given(seed=st.integers(0, 2**20), views=st.integers(1, 3), large=st.booleans())
    def agree(seed: int, views: int, large: bool) -> None:
        nonlocal excluded
        generator = torch.Generator().manual_seed(seed)
        anchors, columns, number = (int(n) for n in torch.randint(1, 9, (3,), generator=generator))
        names = torch.randint(2**62, (7,), generator=generator) if large else torch.arange(7)  # ids of any size

        def some_ids(*shape: int) -> Tensor:
            found = names[torch.randint(7, shape, generator=generator)]
            return found.masked_fill(torch.rand(shape, generator=generator) < 0.1, -1)

        own, candidates = some_ids(anchors, views), some_ids(columns)
        pairs = names[torch.randint(7, (number - 1, 2), generator=generator)]
        truth = expected(own, own[:, 0], candidates.expand(anchors, columns), pairs)
        found = torch.zeros(anchors, columns, dtype=torch.bool)
        identities = Identities.of(own, own[:, 0], candidates, pairs)
        for start in range(0, anchors, 3):  # strips
            rows = slice(start, min(start + 3, anchors))
            identities.mask_(found[rows], rows, True)
        assert found.tolist() == truth
        per_anchor = some_ids(anchors, columns)
        assert related(own, own[:, 0], per_anchor, pairs).tolist() == expected(own, own[:, 0], per_anchor, pairs)
        excluded += int(found.sum())

    agree()
    assert excluded > 300


def test_ids_take_no_matrix() -> None:
    rows, size, pairs = 2048, 4096, 5000
    generator = torch.Generator().manual_seed(0)
    z1, z2, queue = (torch.randn(n, 16, generator=generator) for n in (rows, rows, size))
    ids, negative_ids = (torch.randint(10**6, (n,), generator=generator) for n in (rows, size))
    listed = torch.stack([ids[torch.randint(rows, (pairs,))], negative_ids[torch.randint(size, (pairs,))]], dim=1)
    loss = hn.InfoNCE(backend="tiled")
    with LargestTensor() as watch:
        loss(
            z1.requires_grad_(), z2, negatives=queue, ids=ids, negative_ids=negative_ids, not_negatives=listed
        ).backward()
    assert watch.elements <= strips.STRIP_ELEMENTS["cpu"] < 2 * rows * size
    assert loss.diagnostics()["support"] < 2 * rows - 2 + size - 1


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_duplicates_in_a_batch_are_not_negatives(backend: str) -> None:
    # Two pairs of the same text, and a third: only the third is a negative of the first two.
    z1, z2 = torch.randn(3, 4), torch.randn(3, 4)
    loss = hn.simcse(0.5, backend=backend, reduction="none")
    cosines = torch.nn.functional.normalize(z1, dim=1) @ torch.nn.functional.normalize(z2, dim=1).T / 0.5
    found = loss(z1, z2, ids=torch.tensor([5, 5, 8]))
    assert torch.allclose(found[0], torch.log1p((cosines[0, 2] - cosines[0, 0]).exp()))
    assert torch.allclose(found[1], torch.log1p((cosines[1, 2] - cosines[1, 1]).exp()))
    by_pair = loss(z1, z2, ids=torch.tensor([1, 2, 3]), not_negatives=torch.tensor([[2, 1]]))
    assert torch.allclose(by_pair, found)
