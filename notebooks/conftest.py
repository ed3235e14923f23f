"""Outputs are compared with those committed, which have four ranks (ranks.how_many)."""

import os

os.environ.setdefault("NOTEBOOK_RANKS", "4")
