"""The life of a request around its handler: keys, limits, deadlines, metrics, replies."""
