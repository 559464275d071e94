"""What wires: configuration to a running cluster, and the command line."""
