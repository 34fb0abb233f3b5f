"""A job on its way to the daemon: the options of a submit, and the report of the answer."""
