"""The wire: code generated from `proto/trainer.proto` by `make proto`, its methods, and records <-> messages."""
