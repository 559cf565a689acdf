"""Measurements, each a command: `python -m bench.NAME`. Results lie in `bench/results/`."""
