"""Correctness, speed and memory on a GPU within a time budget: `python -m eval gpu`.

A section is a list of items (`plan`), which workers run that may die (`worker`, `cli`). Sections a and b,
`kernels`, `formats` and `parity`, are about what is right; c and d are the benches of `eval.bench` here.
"""
