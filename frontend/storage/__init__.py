"""What outlives the processes: the database in --data-dir."""
