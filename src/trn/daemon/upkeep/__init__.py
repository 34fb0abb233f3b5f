"""One daemon for a home, what must be true first, and what is done now and then."""
