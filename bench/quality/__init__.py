"""What quantization costs in quality: `python -m penstock.bench.quality`."""
