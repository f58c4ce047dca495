"""Watches the size of the tensors that PyTorch creates."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor created in its context."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result
