"""Models: weights with the computation over them, one file for each family, behind one interface (`model.py`)."""
