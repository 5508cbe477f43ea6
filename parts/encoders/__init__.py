"""Models whose positions all see each other: their texts are computed whole."""
