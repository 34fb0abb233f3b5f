"""`trn doctor`: what this machine can do."""
