"""The model workers of a pool: one link to each process, what they compute together, and what follows when one fails."""
