"""Files of a run that an event named: their records, and the only way in which they are opened."""
