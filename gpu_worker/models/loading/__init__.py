"""Weights as blocks take them, from a checkpoint or at random, and the models made of them."""
