"""How fast images come, and what a ViT learns of them."""
