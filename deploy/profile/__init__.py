"""Measures a machine and a model pair in process: `paceline profile`."""
