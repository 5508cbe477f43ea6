"""What schedulers do, shown while somebody watches."""
