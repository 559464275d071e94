"""What decides: requests, plans and policies. Imports neither torch nor transformers."""
