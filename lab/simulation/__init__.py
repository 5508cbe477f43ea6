"""The scheduler in virtual time, against a model of the worker: predicts how other options would serve a load."""
