"""Blocks and the tensors they lie in: pools, tables, capacity, layer groups."""
