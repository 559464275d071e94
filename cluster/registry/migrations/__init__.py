"""The registry's tables as they were -> as they are: one module for each step, loaded by Alembic."""
