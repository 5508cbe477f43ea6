"""IP addresses and networks in options."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def problem_with_network(given: str) -> str:
    """Return why this is neither an address nor a network; empty if it is one."""
    try:
        ipaddress.ip_network(given)
    except ValueError:
        try:
            whole = ipaddress.ip_network(given, strict=False)
        except ValueError:
            return "it must be an IP address or a network such as 10.0.0.0/8, not a name"
        return f"the network is {whole}, or the address {given.partition('/')[0]}"
    return ""


def read_address(text: str) -> Address | None:
    """Return an IP address, without its zone, and as IPv4 if it is IPv4 within IPv6; None if it is no address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
