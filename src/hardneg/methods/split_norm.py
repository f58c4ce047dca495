"""Batch-norm with separate statistics for parts of a batch, as on several devices (MoCo; METHODS, section 3)."""

from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from hardneg import checks


class SplitBatchNorm(_BatchNorm):
    """Batch-norm with separate means and variances for ``groups`` parts of the batch; sample i is in part i % groups.

    MoCo needs it: if the query and the key of a sample share batch statistics, these reveal which key belongs to which
    query, and the loss decreases without learning a representation. MoCo shuffles the keys between devices; on a single
    device the parts replace the devices. Shuffle the keys before the encoder, and restore their order after it.

    Running statistics are averaged over the parts. In evaluation it is plain batch-norm, with the same names in its
    state dict. Images in channels_last layout are copied, unlike in plain batch-norm.

    Args:
        features: channels of the input, (B, features, …)
        groups: parts; every batch must be a multiple of it
        eps, momentum, affine, track_running_stats: as for `torch.nn.BatchNorm2d`

    Examples:
        >>> import torch
        >>> norm = SplitBatchNorm(1, groups=2)
        >>> norm(torch.tensor([[1.0], [10.0], [3.0], [30.0]])).flatten().round().tolist()
        [-1.0, -1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        features: int,
        groups: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(features, eps, momentum, affine, track_running_stats)
        checks.whole("groups", groups)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.groups == 1:
            return super().forward(x)
        if len(x) % self.groups:
            raise ValueError(
                f"a batch of {len(x)} cannot be split into {self.groups} equal parts: choose groups (memory.split) "
                "that divides it"
            )
        # A channel of each part becomes a separate channel: one call, and no copy.
        parts = x.reshape(-1, self.groups * x.shape[1], *x.shape[2:])  # (B / groups, groups·C, …)
        weight, bias = (None if w is None else w.repeat(self.groups) for w in (self.weight, self.bias))
        running_mean, running_var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if running_mean is None or running_var is None or count is None:
            return batch_norm(parts, None, None, weight, bias, True, 0.0, self.eps).reshape(x.shape)
        count.add_(1)
        share = 1 / float(count) if self.momentum is None else self.momentum
        mean, var = running_mean.repeat(self.groups), running_var.repeat(self.groups)  # (groups·C,) each
        result = batch_norm(parts, mean, var, weight, bias, True, share, self.eps).reshape(x.shape)
        running_mean.copy_(mean.view(self.groups, -1).mean(dim=0))
        running_var.copy_(var.view(self.groups, -1).mean(dim=0))
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"the input must have shape (B, C, …), got {tuple(input.shape)}")


def split_norms(module: nn.Module, groups: int) -> nn.Module:
    """The module with every batch-norm in it replaced by a `SplitBatchNorm` with the same weights.

    module: changed in place and returned; if it is itself a batch-norm, it is not changed and its replacement is
    returned · groups: parts of a batch

    Examples:
        >>> split_norms(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), groups=2)[1].groups
        2
    """
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        made = SplitBatchNorm(
            module.num_features, groups, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        for tensor in (module.running_mean, module.weight):
            if tensor is not None:
                made.to(tensor)  # before the state is loaded, so that it is not rounded
        made.load_state_dict(module.state_dict())
        return made.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, split_norms(child, groups))
    return module
