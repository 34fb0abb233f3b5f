"""Helpers around torch: seeds, optimizers, checkpoints of trainable modules, memory."""
