"""Benches of whole models, and what they are measured on."""
