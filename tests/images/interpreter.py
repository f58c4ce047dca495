"""The fused views and their programs, to be called in a process that interprets Triton or does not."""

from typing import Any

from interpreter import process
from torch import Tensor

from hardneg.images.views import ImageViews

__all__ = ["compiled", "make_views", "process"]


def make_views(
    views: ImageViews, images: Tensor, uniform: Tensor, seed: int, first: int, channels_last: bool
) -> Tensor:
    """The fused views."""
    from hardneg.images import triton_views

    return triton_views.make_views(views, images, uniform, seed, first, channels_last)


def compiled(kernel: str, types: dict[str, str], constants: dict[str, Any]) -> str:
    from hardneg.images import triton_programs

    """The assembly of a kernel of `hardneg.images.triton_programs` for an H100 or H200; types of arguments by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_programs, kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return str(made.asm["ptx"])
