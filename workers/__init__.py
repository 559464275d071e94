"""What owns devices: prefill, decode, draft and training workers."""
