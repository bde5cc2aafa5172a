"""How a forward is run. Knows rows, never drafts."""
