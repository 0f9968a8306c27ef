"""Tools of this project's developers; no part of the wheel."""
