"""Which trn this is. The installed package says the same; asking it costs more than many a command."""

VERSION = "0.1.0"
