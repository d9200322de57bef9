"""The sections of a recipe, all but the method's: what may be asked for."""
