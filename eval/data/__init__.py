"""The texts that ship, and how others are read."""

from pathlib import Path

DATA_DIR = Path(__file__).resolve().parent
