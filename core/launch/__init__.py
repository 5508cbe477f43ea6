"""Starting, watching and stopping the processes."""
