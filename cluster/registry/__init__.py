"""Versions of drafts, how they came to be and what was decided about them -> a database, and back."""
