"""Benchmarks of the learning loop."""
