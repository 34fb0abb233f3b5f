"""`trn`: finds the verb, loads it alone. Tables and curves at a terminal, JSON lines in a pipe."""
