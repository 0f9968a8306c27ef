"""Benches of attention layers without a model."""
