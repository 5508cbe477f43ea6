"""aiohttp: sockets, connections, bodies, routes."""
