"""The parts of `eval/gpu_check.py`.

A section is a list of items (`items`); worker processes run them (`worker`), a supervisor that never touches
the device starts the workers, restarts the dead and stops the late (`supervisor`).

- `kernels` and `history`, `parity`, `attention`, `end_to_end`: the four sections;
- `sections`: their registry; `settings`, `budget`: what to run, and how long;
- `device`: everything that differs between a GPU and the CPU of a dry run;
- `goals`, `table`, `report`: what comes out.
"""
