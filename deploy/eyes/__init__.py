"""Metrics, alerts and panels -> the files that Prometheus, Grafana and people read."""
