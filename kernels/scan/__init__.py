"""What recurrent layers compute: convolutions and scans that keep a state for each row instead of keys and values."""
