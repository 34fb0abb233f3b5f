"""`trn`: the command line. One module for each verb; `main` loads the one that was asked for."""
