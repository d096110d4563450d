"""The YAML file: its schema, its loading with line numbers, and the errors a user sees. Imports no jax."""
