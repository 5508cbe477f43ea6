"""From a decoded body to a valid request."""
