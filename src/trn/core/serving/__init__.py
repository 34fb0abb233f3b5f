"""Served models: records of a served name, its promotions, and the feedback that a next run was asked for with."""
