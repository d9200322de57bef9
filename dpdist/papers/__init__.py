"""What only reproductions of papers need: methods that a recipe names, and nobody imports."""
