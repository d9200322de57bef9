"""The sections of a recipe as pydantic classes: all but the method's, without torch or Ray."""
