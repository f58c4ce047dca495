"""Triton kernels of the fused loss for GPUs."""
