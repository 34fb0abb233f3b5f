"""Runs as the registry has them: finding one, explaining it, its line of descent."""
