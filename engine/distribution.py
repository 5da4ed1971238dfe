"""The name and version of the installed package, and how to install an extra of it.

PyPI's `tandem` is another project, so error lines and documents never offer that name to pip.
"""

from typing import Final

NAME: Final = "tandem-pd"
"""`project.name` of pyproject.toml."""
VERSION: Final = "0.1.0"
"""`project.version` there."""


def how_to_install(extra: str) -> str:
    """The command for an extra of pyproject.toml, as the end of an error line."""
    return f"pip install '.[{extra}]' in a checkout of Tandem"
