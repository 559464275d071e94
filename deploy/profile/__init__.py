"""A configuration and this machine -> measured times of its models as tables and JSON: `paceline profile`."""
