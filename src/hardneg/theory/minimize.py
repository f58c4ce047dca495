"""Minimize a differentiable function of a tensor by scipy, which starts faster than the optimizers of torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.extras import required


def minimized(loss: Callable[[Tensor], Tensor], start: Tensor, iterations: int = 400) -> Tensor:
    """A local minimum of the loss near the start, a float64 tensor of any shape, by L-BFGS.

    Examples:
        >>> minimized(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2, dtype=torch.float64)).round(decimals=6)
        tensor([3., 3.], dtype=torch.float64)
    """

    def value_and_gradient(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        free = torch.from_numpy(flat.copy()).view(start.shape).requires_grad_()
        value = loss(free)
        (gradient,) = torch.autograd.grad(value, free)
        return float(value.detach()), gradient.flatten().numpy()

    solved: Any = required("scipy.optimize", "train").minimize(
        value_and_gradient,
        start.flatten().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxfun": 5 * iterations, "ftol": 1e-16, "gtol": 1e-11, "maxcor": 30},
    )
    return torch.from_numpy(solved.x).view(start.shape)
