"""The standard library and generated tasks -> the bundled pair: a target, its draft and what made both."""
