"""What may be queued: reading and judging a submit or a resume, and finding what it is equal to."""
