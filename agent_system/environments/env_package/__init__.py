"""One sub-package per environment: its engine, its vectorised form and its action parser."""
