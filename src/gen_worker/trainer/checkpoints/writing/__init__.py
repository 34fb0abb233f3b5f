"""One save as durable steps, in a process of its own."""
