"""Tables and figures of papers, repeated: recipes, the published numbers, ours beside them."""
