"""The operator side of trn: client, command line and daemon."""
