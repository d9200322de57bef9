"""DPAL as published, its sound forms StoBatch and the functional mechanism."""
