"""Benchmarks behind `tools/bench.py`; speed is measured here and never in a test."""
