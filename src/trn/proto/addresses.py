"""Addresses that a token may travel to in the clear."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Only by its number or as `localhost`: another name may mean anything tomorrow."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
