"""What every room stands on: errors, fields, files and their doors, the console."""
