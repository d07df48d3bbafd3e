"""Addresses and ports of this machine."""

from __future__ import annotations

import ipaddress
import random
import socket

__all__ = ["get_free_port", "is_ipv4", "is_ipv6"]

# Below Linux's ephemeral range (32768–60999): an outgoing connection cannot take the port before we listen on it.
_PORT_RANGE = (20000, 32000)
_ATTEMPTS = 200


def is_ipv4(ip_str: str) -> bool:
    """Whether the text is an IPv4 address."""
    return _is_address(ip_str, ipaddress.IPv4Address)


def is_ipv6(ip_str: str) -> bool:
    """Whether the text is an IPv6 address."""
    return _is_address(ip_str, ipaddress.IPv6Address)


def _is_address(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def get_free_port() -> int:
    """A TCP port that nobody listens on, on any interface.

    It is drawn at random, so that groups starting at the same time rarely meet; ``RuntimeError`` when none is found.
    """
    draw = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = draw.randrange(*_PORT_RANGE)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free TCP port found in {_PORT_RANGE[0]}–{_PORT_RANGE[1] - 1} after {_ATTEMPTS} attempts")
