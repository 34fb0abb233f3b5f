"""The job: its fields, and the rules that join them."""
