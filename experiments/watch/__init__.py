"""What watching a run costs, and whether what it says is so."""
