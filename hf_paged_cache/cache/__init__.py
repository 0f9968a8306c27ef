"""`PagedCache` and its layers: the contract with `transformers`, and what a user does beside `generate`."""
