"""The scheduler's process: its loop, its sockets, and what it does about workers that die."""
