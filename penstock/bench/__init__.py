"""What is installed of the folder `bench/`: the load generator and the measure of quality, which commands use."""
