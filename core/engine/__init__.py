"""The scheduler's process: its event loop, its sockets, and what it does when workers die."""
