"""The callbacks that a job names."""

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import PluginError
from gen_worker.trainer import callbacks
from gen_worker.trainer.attempt.failure import say
from gen_worker.trainer.author.plugin_import import import_symbol
from gen_worker.trainer.callbacks.base import Callback
from gen_worker.trainer.callbacks.early_stopping import EarlyStopping


def load_callbacks(job: TrainingJobSpec) -> list[Callback]:
    """Early stopping first, then those that the job names, in its order."""
    stopping = job.early_stopping
    made: list[Callback] = [] if stopping is None else [EarlyStopping.from_spec(stopping)]
    return made + [load_callback(ref, f"callbacks[{number}]") for number, ref in enumerate(job.callbacks)]


def load_callback(ref: str, field: str) -> Callback:
    """The callback that `field` of the job names; PluginError where it is none."""
    if ":" not in ref:
        shipped = f": did you mean gen_worker.trainer.callbacks:{ref}?" if ref in callbacks.__all__ else ""
        raise PluginError(f"{field}: found {ref!r}, expected module:symbol{shipped}")
    try:
        found = import_symbol(ref)
    except PluginError as fault:
        raise PluginError(f"{field}: {fault}") from fault
    if isinstance(found, type) and issubclass(found, Callback):
        try:
            found = found()
        except TypeError as fault:
            raise PluginError(
                f"{field}: {ref} cannot be built without arguments ({say(fault)}): name an instance instead,"
                " such as my_module:my_callback"
            ) from fault
    if not isinstance(found, Callback):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise PluginError(f"{field}: {ref} is a {kind}, expected a subclass of gen_worker.trainer.Callback")
    return found
