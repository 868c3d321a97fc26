"""Described machines: accelerators, links, and what a collective costs over them."""
