"""Several processes of one run: starting, meeting, stopping together, whose error is reported."""
