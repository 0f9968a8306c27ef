"""Compare caches on real texts: quality, fidelity, memory and speed, from one command.

`python -m eval` loads a model, runs every chosen task with every chosen cache and prints one table.

- `settings`: what to run (defaults, then a YAML file, then the command line);
- `models`, `caches`, `tasks`, `metrics`: registries, one entry or file for each thing that can be chosen;
- `runner`: generates, batch by batch, with the contenders interleaved;
- `measure`: time and memory of one batch; `environment`: the machine and the versions;
- `report`: the table, `results.json`, `report.md`; `plots`: the pictures in it.
"""
