"""The operator's API and the dashboard's host on Control's port."""
