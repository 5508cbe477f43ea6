"""Convolutions and scans of recurrent layers, which keep a state for each row instead of keys and values."""
