"""Python's standard library -> the bundled pair: a tiny target, its draft and the script that makes both."""
