"""Compare caches on real texts, by speed, by format and by model type: `python -m eval`.

- `run`: every task with every cache; `tasks`, `caches`: registries of what can be chosen; `data`: texts;
- `bench`, `gpu`: speed, bytes and memory on a CPU and on a GPU; `quality`: formats; `zoo`: all model types;
- `report`: tables and files of a run, the README's tables; `plots`: the pictures;
- `core`: what they share; `results`: the numbers that the README shows.
"""
