"""One attempt: lease, parts, loop, the one terminal event; and the settings and state that `Trainer` shows of it."""
