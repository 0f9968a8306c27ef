"""What storing K and V in fewer bits does to a model's predictions: `python -m eval.quality`."""
