"""What to guess and what to keep. Knows tokens and probabilities."""
