"""The handlers behind the routes."""
