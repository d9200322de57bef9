"""Foundations: errors, checked fields, safe files, console, exact bounds; imports no other room."""
