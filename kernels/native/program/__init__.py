"""A model as a list of native operations, and the steps that it computes."""
