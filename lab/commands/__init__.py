"""`penstock plan` and `penstock simulate`."""
