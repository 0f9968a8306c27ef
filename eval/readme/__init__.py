"""Tables of the README from `eval/results/`, each a template between its markers: `python -m eval readme`."""
