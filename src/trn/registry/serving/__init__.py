"""Rows of served names, promotions and feedback: what the registry changes and reads of them."""
