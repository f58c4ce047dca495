"""Triton kernels: the fused loss on a GPU."""
