"""The scheduler process: its event loop, its sockets, and its recovery when workers die."""
