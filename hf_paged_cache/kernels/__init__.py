"""Kernels over blocks: write, copy, decode, prefill over history. Reference beside fast versions, one signature."""
