"""One forward: its step, rows, hidden tokens, ids, weights and recurrent states."""
