"""Paged attention in `transformers`: its functions, masks and views of what is stored."""
