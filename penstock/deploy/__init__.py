"""What is installed of the folder `deploy/`: Ray."""
