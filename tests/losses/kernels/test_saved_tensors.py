"""An overwritten input is named as the cause of a failed backward pass; other errors of autograd are unchanged."""

import pytest
import torch

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
