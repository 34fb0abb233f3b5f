"""An exponential moving average of the weights, in a second module that is used wherever nothing is trained."""

import torch


class WeightAverage:
    """`module` holds the average; buffers are copied, not averaged. Both modules are cut alike if they are sharded."""

    def __init__(
        self, module: torch.nn.Module, *, live: torch.nn.Module, decay: float, every: int = 1
    ) -> None:
        self.module = module.requires_grad_(False)
        self.every = every
        self._weight = 1.0 - decay
        self._live = live
        self._pairs: tuple[list[torch.Tensor], ...] | None = None

    @torch.no_grad()
    def update(self) -> None:
        averages, values, kept, current = self._pairs or self._pair()
        torch._foreach_lerp_(averages, values, self._weight)
        if kept:
            torch._foreach_copy_(kept, current)

    def _pair(self) -> tuple[list[torch.Tensor], ...]:
        """(averages, what they average, what is copied, from where); the same tensors for a whole run."""
        live, live_buffers = dict(self._live.named_parameters()), dict(self._live.named_buffers())
        trained = {name: value for name, value in live.items() if value.requires_grad}
        averages = [_local(value) for name, value in self.module.named_parameters() if name in trained]
        values = [_local(value) for value in trained.values()]
        kept = [_local(value) for value in self.module.buffers()]
        current = [_local(live_buffers[name]) for name, _ in self.module.named_buffers()]
        pairs = averages, values, kept, current
        is_sharded = any(hasattr(value, "full_tensor") for value in live.values())
        self._pairs = None if is_sharded else pairs
        return pairs


def _local(value: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    to_local = getattr(value.detach(), "to_local", None)
    local: torch.Tensor = value.detach() if to_local is None else to_local()
    return local
