"""Published runs, and the efficiency numbers that are fitted on them."""
