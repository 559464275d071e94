"""The OpenAI-compatible front of the cluster: HTTP in, text pieces out."""
