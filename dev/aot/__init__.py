"""Ahead-of-time compile gate: every kernel variant that ships, compiled for every target, without a GPU.

`python -m dev.aot` prints what the compilers made of the kernels, and fails where
registers spill, where shared memory runs over, or where K and V move in narrower pieces than their rows
allow.
"""
