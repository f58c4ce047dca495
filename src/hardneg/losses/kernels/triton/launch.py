"""Launches Triton kernels with little host time: a compiled kernel is looked up once and then called directly.

At every launch Triton binds and inspects all arguments to find the compiled kernel for them. In small batches that
takes longer than everything else on the host.
"""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

try:
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

# On AMD GPUs a compiled kernel depends on more than `Compiled.signature` holds: there Triton looks it up every time.
CACHES_KERNELS = torch.version.hip is None

# The cache is emptied at this size: every step may have new sizes, and Triton keeps the kernels themselves.
MAX_CACHED = 1024


def launch(
    program: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> None:
    """Runs a kernel; arguments: all of its arguments by name · registers: maximum number per thread."""
    if not (CACHES_KERNELS and isinstance(program, JITFunction)):  # the interpreter has no compiled kernels
        program[grid](**arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
        return
    compiled = _compiled.get(program.fn)
    if compiled is None:
        compiled = _compiled[program.fn] = Compiled(program)
    compiled.launch(grid, arguments, warps, stages, registers)


class Compiled:
    """The compiled versions of one kernel, by signature of the arguments."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.in_order = itemgetter(*program.arg_names)
        self.constants: int = program.constexprs[0]  # index of the first one
        assert list(program.constexprs) == list(range(self.constants, len(program.arg_names)))
        self.cache: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int, registers: int | None = None
    ) -> None:
        """Runs the kernel in the current stream of the current device."""
        device = driver.active.get_current_device()
        values = list(self.in_order(arguments))
        signature = self.signature(values)
        key = None if signature is None else (device, warps, stages, registers, *signature)
        found = self.cache.get(key) if key is not None else None
        if found is not None:
            found[(*grid, 1, 1)[:3]](*values, stream=driver.active.get_current_stream(device))
            return
        made = self.program[grid](**arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
        if key is not None and made is not None:
            if len(self.cache) >= MAX_CACHED:
                self.cache.clear()
            self.cache[key] = made

    def signature(self, values: list[Any]) -> list[Any] | None:
        """Everything that a compiled kernel depends on; tensors in ``values`` are replaced by their addresses.

        It depends on the dtype of a tensor and on whether it is aligned to 16 bytes, on the dtype and the tile shape of
        a tensor descriptor, on whether an integer is 1, divisible by 16, or beyond 32 bits, on which arguments are None
        or floats, and on the constants, which come last. None for any other argument.
        """
        signature = values.copy()
        for position in range(self.constants):
            value = values[position]
            if value is None or type(value) is int:
                continue
            if isinstance(value, Tensor):
                address = values[position] = value.data_ptr()
                signature[position] = value.dtype if address % 16 == 0 else (value.dtype,)
            elif type(value) is float:
                signature[position] = float
            elif TensorDescriptor is not None and type(value) is TensorDescriptor:
                signature[position] = (value.base.dtype, *value.block_shape)
            else:
                return None
        return signature


_compiled: dict[Any, Compiled] = {}  # by function: to hash a kernel, Triton reads its source
