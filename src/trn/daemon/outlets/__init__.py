"""Logs for machines and the event bus: committed events, delivered to the outside at least once."""
