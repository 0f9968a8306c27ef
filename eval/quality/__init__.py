"""Formats compared by what they do to a model's predictions on real text: `python -m eval quality`."""
