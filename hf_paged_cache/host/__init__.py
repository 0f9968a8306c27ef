"""`transformers`, CPython and torch as this package finds them."""
