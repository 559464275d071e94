"""Captured requests and a draft -> a draft that is nearer to its target on them."""
