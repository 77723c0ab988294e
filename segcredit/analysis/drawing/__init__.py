"""How the analyses look: one style, one file per kind of figure."""
