"""A live view of the scheduler (docs/watching.md), made only while somebody watches."""
