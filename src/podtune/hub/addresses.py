"""Addresses of object stores (gs://, s3://, and whatever else fsspec reaches). Used by models, data and outputs."""

from typing import Any, cast

from podtune.config.errors import UserError

_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


def is_address(source: str) -> bool:
    """Whether `source` is an address (scheme://…), and no path of this machine."""
    return "://" in source


def is_remote(source: str) -> bool:
    """Whether `source` is an address other than the Hub's."""
    return is_address(source) and not source.startswith("hub://")


def check_address(address: str) -> None:
    """Raises UserError when this installation cannot reach addresses of this kind. Asks no network."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    scheme, _, place = address.partition("://")
    if not place.strip("/") or place.startswith("/"):
        raise UserError(f"{address}: no bucket is named. Write {scheme}://BUCKET/PATH.")
    try:
        cast(Any, fsspec).get_filesystem_class(scheme)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        way = f'pip install "podtune[{extra}]"' if extra else str(error)
        raise UserError(f"{address}: {scheme}:// needs a package that is not installed. Run: {way}") from error
    except ValueError as error:
        raise UserError(
            f"{address}: {scheme}:// is not a kind of address known here. Use a path, gs:// or s3://."
        ) from error


def file_system(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it. Raises UserError for one of no use here."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    check_address(address)
    try:
        system, path = cast(tuple[Any, str], cast(Any, fsspec).core.url_to_fs(address))
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: cannot be used: {error}. Check the address.") from error
    # File systems live as long as the process and remember listings; the store may have changed.
    system.invalidate_cache()
    return system, path
