"""What a run is: its recipe, its folder, its records, its archive."""
