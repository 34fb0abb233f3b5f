"""HTTP beside the daemon: REST, live events, the page. A client like any other: it holds no truth and may be killed."""
