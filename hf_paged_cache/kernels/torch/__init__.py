"""Kernels in torch operations alone."""
