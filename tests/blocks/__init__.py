"""Tests of the bookkeeping."""
