"""Migrations of the metric store, by number."""
