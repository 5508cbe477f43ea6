"""`penstock replay`: what a server recorded, computed again and compared."""
