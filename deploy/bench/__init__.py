"""The benchmark of one machine: engine with drafts against engine without, and against its peers."""
