"""A machine, a configuration and perhaps a running cluster -> findings, each with what to do about it."""
