"""Draws for pages, notebooks and terminals, below all that is drawn.

- `meshtrain.draw.svg`: SVG drawings, their colours, and an SVG as an image.
- `meshtrain.draw.page`: self-contained HTML pages, for a phone, a desk and paper, light and dark.
- `meshtrain.draw.picture`: pictures for notebooks, which are text in a terminal; tables in both.

No script and nothing fetched: HTML with inline styles or one style sheet, and SVG.
"""
