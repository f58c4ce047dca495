"""An overwritten input is named as the cause of a failed backward pass; other errors of autograd are unchanged."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn

OVERWRITTEN = r"modified by an inplace operation before backward\(\): call queue\.enqueue\(\) and"


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("given", [{}, {"scale": 2.0}], ids=["short path", "general path"])
def test_an_overwritten_input_raises_with_the_error_of_autograd_as_cause(
    backend: str, given: dict[str, float], normalize: bool
) -> None:
    z1, z2, negatives = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3), torch.randn(6, 3)
    for tensor in (z2, negatives):
        value = hn.moco(backend=backend, normalize=normalize)(z1, z2, negatives=negatives, **given)  # type: ignore[arg-type]
        tensor.mul_(2)
        with pytest.raises(RuntimeError, match=OVERWRITTEN) as raised:
            value.backward()
        assert "is at version" in str(raised.value.__cause__)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_second_backward_pass_has_the_error_of_autograd(backend: str) -> None:
    value = hn.simclr(backend=backend)(torch.randn(4, 3, requires_grad=True), torch.randn(4, 3))
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


@pytest.mark.parametrize("preset", [hn.simclr, hn.supcon, hn.hcl, hn.clip])
@pytest.mark.parametrize("general", [False, True], ids=["short path", "general path"])
def test_the_matrix_of_scores_is_freed_by_the_backward_pass_while_the_loss_is_kept(preset: Any, general: bool) -> None:
    z1, z2 = torch.randn(2, 32, 8).unbind()
    given: dict[str, Any] = {"labels": torch.arange(32) % 5} if preset is hn.supcon else {}
    if general:
        given["scale"] = 2.0
    saved: list[weakref.ref[Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = preset(backend="tiled")(z1.requires_grad_(), z2, **given)
    sizes = [x.numel() for ref in saved if (x := ref()) is not None]
    assert general or max(sizes) >= 32 * 32  # the general path keeps it for β of 0 or 1 only
    value.backward()
    gc.collect()
    alive = [x.shape for ref in saved if (x := ref()) is not None and x.numel() > 2 * z1.numel()]
    assert alive == []
