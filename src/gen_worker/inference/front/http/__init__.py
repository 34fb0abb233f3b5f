"""HTTP/1.1: addresses, connections, and what each route does."""
