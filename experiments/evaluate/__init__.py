"""What models score, held against independent computations."""
