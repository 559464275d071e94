"""Figures of served streams -> when to train a draft, whether to deploy it, and when to take it back."""
