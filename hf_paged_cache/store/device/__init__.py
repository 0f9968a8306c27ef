"""A device as pools see it: memory, tables, streams, flags."""
