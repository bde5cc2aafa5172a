"""The life of a request, and the round that advances it."""
