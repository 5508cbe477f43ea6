"""The lab: what a model needs of a machine, what users would feel, and how fast this machine is."""
