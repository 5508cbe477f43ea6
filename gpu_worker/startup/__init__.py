"""From a configuration to a worker that is ready."""
