"""The arithmetic of privacy: numpy, scipy and dp_accounting; never torch or ray."""
