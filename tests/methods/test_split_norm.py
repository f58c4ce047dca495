"""Split batch-norm is plain batch-norm of each part of the batch, and nothing passes between parts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from hardneg.images.encoders import resnet18
from hardneg.methods.split_norm import SplitBatchNorm, split_norms


def by_loop(x: Tensor, norm: nn.BatchNorm1d | nn.BatchNorm2d, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plain batch-norm of each part: outputs, and the averages of the running statistics."""
    result, means, variances = torch.empty_like(x), [], []
    for part in range(groups):
        own = copy.deepcopy(norm)
        result[part::groups] = own(x[part::groups])
        assert own.running_mean is not None
        assert own.running_var is not None
        means.append(own.running_mean)
        variances.append(own.running_var)
    return result, torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)


@given(
    groups=st.integers(1, 4),
    each=st.integers(2, 5),
    channels=st.integers(1, 3),
    side=st.sampled_from([None, 1, 3]),
    momentum=st.sampled_from([0.1, 1.0, None]),
)
@settings(max_examples=60, deadline=None)
def test_split_norm_agrees_with_a_loop_over_the_parts(
    groups: int, each: int, channels: int, side: int | None, momentum: float | None
) -> None:
    torch.manual_seed(groups)
    kind = nn.BatchNorm1d if side is None else nn.BatchNorm2d
    plain = kind(channels, momentum=momentum).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    split = split_norms(copy.deepcopy(plain), groups)
    assert isinstance(split, SplitBatchNorm)
    shape = (groups * each, channels) if side is None else (groups * each, channels, side, side)
    x = torch.randn(shape, dtype=torch.float64)
    expected, mean, variance = by_loop(x, plain, groups)
    assert_close(split(x), expected)
    assert_close(split.running_mean, mean)
    assert_close(split.running_var, variance)
    assert int(split.num_batches_tracked or 0) == 1


def test_the_gradient_agrees_with_a_loop_over_the_parts() -> None:
    plain = nn.BatchNorm2d(3).double()
    x = torch.randn(8, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(8, 3, 2, 2, dtype=torch.float64)
    split = split_norms(copy.deepcopy(plain), 4)
    (ours,) = torch.autograd.grad((split(x) * weights).sum(), x)
    (theirs,) = torch.autograd.grad((by_loop(x, plain, 4)[0] * weights).sum(), x)
    assert_close(ours, theirs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_changing_the_images_of_one_part_changes_only_its_outputs(layout: torch.memory_format) -> None:
    network = split_norms(resnet18(), 4).train()
    images = torch.randn(8, 3, 16, 16).to(memory_format=layout)
    other = images.clone()
    other[1::4] = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        moved = (network(images) - network(other)).abs().amax(dim=1)
    assert (moved[1::4] > 1e-3).all()
    assert moved.view(2, 4)[:, [0, 2, 3]].max() < 1e-5


def test_in_evaluation_mode_outputs_and_state_are_those_of_plain_batch_norm() -> None:
    plain = resnet18()
    split = split_norms(copy.deepcopy(plain), 4)
    assert list(split.state_dict()) == list(plain.state_dict())
    images = torch.randn(3, 3, 16, 16)  # no multiple of 4
    assert torch.equal(split.eval()(images), plain.eval()(images))


def test_affine_weights_and_running_statistics_are_optional() -> None:
    plain = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    x = torch.randn(6, 2)
    expected = torch.empty_like(x)
    for part in range(3):
        expected[part::3] = plain(x[part::3])
    assert_close(split_norms(plain, 3)(x), expected)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 6 cannot be split into 4"):
        SplitBatchNorm(2, groups=4)(torch.randn(6, 2))
    with pytest.raises(ValueError, match="groups must be a whole number"):
        SplitBatchNorm(2, groups=0)
