"""The views by Triton and the assembly of their kernels, to be called in a process of `interpreter.process`."""

from typing import Any

from interpreter import process
from torch import Tensor

from hardneg.images.views import ImageViews

__all__ = ["compiled", "make_views", "process"]


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int, channels_last: bool
) -> Tensor:
    """The views, computed by Triton."""
    from hardneg.images import triton_views

    return triton_views.make_views(views, images, uniform, seed, first, channels_last)


def compiled(kernel: str, types: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX of a kernel of `hardneg.images.triton_programs` for compute capability 9.0; types: of arguments by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hardneg.images import triton_programs

    function = getattr(triton_programs, kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    positions = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=positions)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return str(made.asm["ptx"])
