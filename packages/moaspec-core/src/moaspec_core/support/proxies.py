"""The proxy of the environment for an address, or what is wrong with it."""

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit

from moaspec_core.errors import InputError

SOCKS_PACKAGE = "socksio"
_SOCKS = {"socks": "socks5", "socks5": "socks5", "socks5h": "socks5h"}
"""Schemes of SOCKS proxies, as the HTTP library spells them."""
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = re.compile(r"(?:[^.]+\.)*localhost\.?", re.IGNORECASE)


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """URL without user and password, and the variable."""
        return f"{_shown(self.url)} of ${self.variable}"


def proxy_for(url: str) -> Proxy | None:
    """The proxy of the environment for an address; None for a direct connection.

    Connections to this machine are always direct: no proxy reaches it.

    Raises:
        InputError: the proxy cannot be used; names the variable.
    """
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") or _is_excepted(parts):
        return None
    return _named(parts.scheme) or _named("all")


def require_proxies() -> None:
    """InputError where a variable names a proxy that cannot be used.

    For libraries that read all of these variables themselves.
    """
    if "*" in _exceptions():
        return
    for scheme in (*_PORTS, "all"):
        proxy = _named(scheme)
        if proxy is not None and _proxies()[scheme].strip().lower().startswith("socks:"):
            raise InputError(f"${proxy.variable} begins with socks://; write socks5:// instead.")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: 127.0.0.0/8, ::1, localhost or a name below it."""
    if _LOOPBACK.fullmatch(host):
        return True
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return address is not None and (address.is_loopback or address.is_unspecified)


def _proxies() -> dict[str, str]:
    """Proxies by scheme, of the environment or the system's settings."""
    from urllib.request import getproxies  # here: its import takes longer than most of `--help`

    return getproxies()


def _named(scheme: str) -> Proxy | None:
    """The proxy of a scheme, checked."""
    value = _proxies().get(scheme, "").strip()
    if not value:
        return None
    variable = next(
        (name for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY") if os.environ.get(name)),
        f"{scheme.upper()}_PROXY",  # of the system's settings
    )
    return Proxy(_checked(value if "://" in value else f"http://{value}", variable), variable)


def _checked(value: str, variable: str) -> str:
    advice = "Set it to http://HOST:PORT, unset it, or name the server's host in $NO_PROXY."
    try:
        parts = urlsplit(value)
        valid = bool(parts.hostname) and (parts.port or 0) >= 0 and not re.search(r"\s", value)
    except ValueError:
        raise InputError(f"${variable} holds no URL of a proxy. {advice}") from None
    if not valid:
        raise InputError(f"${variable} is {_shown(value)}, which is no URL of a proxy. {advice}")
    scheme = parts.scheme.lower()
    if scheme in _PORTS:
        return value
    if scheme not in _SOCKS:
        raise InputError(
            f"${variable} is {_shown(value)}, and proxies are http://, https:// or socks5://. "
            f"{advice}"
        )
    if find_spec(SOCKS_PACKAGE) is None:
        raise InputError(
            f"${variable} is {_shown(value)}, and a SOCKS proxy needs the package "
            f"{SOCKS_PACKAGE}: pip install {SOCKS_PACKAGE}. Or else: {advice}"
        )
    return f"{_SOCKS[scheme]}://{value.partition('://')[2]}"


def _shown(value: str) -> str:
    """A proxy's URL without user and password."""
    scheme, _, rest = value.partition("://")
    return repr(f"{scheme}://{rest.rpartition('@')[2]}")


def _is_excepted(parts: SplitResult) -> bool:
    """Whether `NO_PROXY` names the address, by a name, a suffix, an IP or a network."""
    host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)
    return any(_matches(entry, host, port) for entry in _exceptions())


def _exceptions() -> Iterator[str]:
    for entry in re.split(r"[\s,;]+", _proxies().get("no", "")):
        if entry:
            yield entry.partition("://")[2] if "://" in entry else entry


def _matches(entry: str, host: str, port: int | None) -> bool:
    if entry == "*":
        return True
    name, wanted = _split_port(entry.lower())
    if wanted is not None and wanted != port:
        return False
    address = _address(host)
    if address is not None:
        return any(address in network for network in _network(name))
    suffix = name.removeprefix("*").strip(".")
    return bool(suffix) and (host == suffix or host.endswith(f".{suffix}"))


def _split_port(entry: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d{1,5}))?", entry)
    if found is None:  # an IPv6 address without brackets
        return entry, None
    return found[1].strip("[]"), int(found[2]) if found[2] else None


def _network(name: str) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    try:
        yield ipaddress.ip_network(name, strict=False)
    except ValueError:
        return


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
