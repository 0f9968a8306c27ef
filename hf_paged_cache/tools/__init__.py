"""Tools for people: planner, profiler, timeline, doctor, command line."""
