"""The tables of README.md, made from `eval/results/`: `python -m eval.readme`."""
