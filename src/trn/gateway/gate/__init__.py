"""Who may come in, and in which form: credentials, the guard before all routes, limits of connections."""
