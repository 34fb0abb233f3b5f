"""The front of a model server: HTTP, the queue, batches, and the pools of model workers behind them.

One thread, one asyncio loop. It never imports torch, and pyarrow only for the first request that needs it.
"""
