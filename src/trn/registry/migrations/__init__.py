"""Migrations of the registry, by number."""
