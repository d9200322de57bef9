"""What poisoned training records cannot change: votes of many models, and what they certify."""
