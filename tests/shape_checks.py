"""The checker of annotations in tests: beartype, with an int accepted for a float as type checkers do (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
