"""The calls of the API, who may make them, and live streams."""
