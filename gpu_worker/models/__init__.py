"""Models: the computation with weights, behind one interface (`model.py`); `loading` brings the weights."""
