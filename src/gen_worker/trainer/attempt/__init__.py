"""One attempt: session, parts, loop, terminal event; and the settings and state that `Trainer` shows."""
