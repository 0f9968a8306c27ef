"""Kernels over blocks: write, copy, decode, prefill over history; a reference beside fast versions."""
