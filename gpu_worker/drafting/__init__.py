"""Who guesses tokens: drafters, one file each."""
