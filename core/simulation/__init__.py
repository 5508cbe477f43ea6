"""The scheduler in virtual time, against a model of the worker: what a load would feel under other options."""
