"""Models: weights and the computation with them, one file per family, behind one interface (`model.py`)."""
