"""A part as another distribution would bring it: each of its files uses what a part of that process can do."""
