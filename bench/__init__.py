"""Load generator, step times, kernel and scheduler benchmarks."""
