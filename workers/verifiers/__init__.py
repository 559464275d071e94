"""Ways of accepting proposed tokens, one file each."""
