"""The aiohttp side: sockets, connections, bodies, routes."""
