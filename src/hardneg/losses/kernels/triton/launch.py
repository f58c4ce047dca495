"""How programs are started: Triton looks for the compiled program once, and from then on it is called directly.

For every launch Triton binds, inspects and writes down all arguments, to find out which compiled program suits them. In
small batches that takes the host longer than everything else.
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

# On AMD's GPUs compiled programs depend on more than `Compiled.kinds` tells: there Triton looks every time.
KEEPS = torch.version.hip is None

# Beyond so many all are forgotten: sizes may be new in every step, and Triton keeps the programs themselves.
MOST = 1024


def launch(
    program: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> None:
    """Run a program on all its arguments, by name; registers: of a thread at most."""
    if not (KEEPS and isinstance(program, JITFunction)):  # the interpreter compiles nothing
        program[grid](**arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
        return
    compiled = _of_programs.get(program.fn)
    if compiled is None:
        compiled = _of_programs[program.fn] = Compiled(program)
    compiled.launch(grid, arguments, warps, stages, registers)


class Compiled:
    """What Triton made of one program, for each kind of arguments."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.in_order = itemgetter(*program.arg_names)
        self.constants: int = program.constexprs[0]  # where they begin
        assert list(program.constexprs) == list(range(self.constants, len(program.arg_names)))
        self.kept: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, grid: tuple[int, ...], arguments: dict[str, Any], warps: int, stages: int, registers: int | None = None
    ) -> None:
        """Run it in the current stream of the current device."""
        device = driver.active.get_current_device()
        values = list(self.in_order(arguments))
        kinds = self.kinds(values)
        key = None if kinds is None else (device, warps, stages, registers, *kinds)
        found = self.kept.get(key) if key is not None else None
        if found is not None:
            found[(*grid, 1, 1)[:3]](*values, stream=driver.active.get_current_stream(device))
            return
        made = self.program[grid](**arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
        if key is not None and made is not None:
            if len(self.kept) >= MOST:
                self.kept.clear()
            self.kept[key] = made

    def kinds(self, values: list[Any]) -> list[Any] | None:
        """All of the arguments that a compiled program may depend on; tensors among the values become addresses.

        It depends on the dtype of a tensor and on whether it begins at a multiple of 16 bytes, on the dtype and the
        shape of the tiles that a descriptor describes, on whether an integer is 1, divisible by 16, or beyond 32 bits,
        on what is None or a float, and on the constants, which come last. None if there is anything else.
        """
        kinds = values.copy()
        for place in range(self.constants):
            value = values[place]
            if value is None or type(value) is int:
                continue
            if isinstance(value, Tensor):
                address = values[place] = value.data_ptr()
                kinds[place] = value.dtype if address % 16 == 0 else (value.dtype,)
            elif type(value) is float:
                kinds[place] = float
            elif TensorDescriptor is not None and type(value) is TensorDescriptor:
                kinds[place] = (value.base.dtype, *value.block_shape)
            else:
                return None
        return kinds


_of_programs: dict[Any, Compiled] = {}  # by function: to hash a program, Triton reads its text
