"""The calls of the service, read from the generated descriptor, and what daemon and client agree on beside them."""

import ipaddress
from typing import Any, NamedTuple

from google.protobuf.message_factory import GetMessageClass

from trn.proto import trainer_pb2

# In the trailing metadata of a call that the daemon itself refused: the name of the error. Without it, the transport
# failed, and whether the call was carried out is not known.
ERROR_KEY = "trn-error"
# In the initial metadata of every stream: a daemon has taken it, though it may have nothing to say for days.
OPEN_KEY = "trn-open"

SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["Trainer"]


class Method(NamedTuple):
    """One call. Requests are always single; `is_stream` says whether there are many answers."""

    name: str
    path: str
    request: Any  # the message classes
    response: Any
    is_stream: bool


METHODS: dict[str, Method] = {
    method.name: Method(
        name=method.name,
        path=f"/{SERVICE.full_name}/{method.name}",
        request=GetMessageClass(method.input_type),
        response=GetMessageClass(method.output_type),
        is_stream=method.server_streaming,
    )
    for method in SERVICE.methods
}


def is_loopback(host: str) -> bool:
    """Whether a token may travel there in the clear. Only by its number or as `localhost`: another name may mean anything tomorrow."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
