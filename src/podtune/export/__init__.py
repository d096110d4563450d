"""Writing models and adapters that the rest of the ecosystem reads."""
