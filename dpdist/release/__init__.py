"""Releases: everything needed to use a published model and to verify its statements."""
