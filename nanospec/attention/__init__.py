"""Where keys live and who sees whom. Knows rows, slots, pages and masks; never hears of drafts."""
