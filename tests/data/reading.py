"""The rows that a source names, as they stand in its files."""

from mlxft.config.schema import DataConfig
from mlxft.data.sources import Row, sets_of


def read(source, **settings) -> list[Row]:
    """Returns the rows of all sets that the source names. settings: keys of `data`."""
    return [row for each in sets_of(source, DataConfig(**settings)) for row in each.rows()]
