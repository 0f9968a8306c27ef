"""Tools that all parts of `eval` share."""
