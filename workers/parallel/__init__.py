"""One target on several ranks: tensor parallelism of prefill and decode workers."""
