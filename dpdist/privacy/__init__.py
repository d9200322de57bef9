"""Privacy accounting: plans, guarantees, ledger and budgets, without torch or Ray."""
