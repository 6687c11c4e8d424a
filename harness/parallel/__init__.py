"""How one step of a model is carried out by several ranks."""
