"""How sizes are written for people."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def written(num_bytes: float) -> str:
    """Returns a number of bytes in the largest unit of which there is a tenth: 16.5 GB, 0.54 GB, 9.77 MB.

    Units are of 10^9, 10^6 and 10^3 bytes.
    """
    scale, unit = next((each for each in _UNITS if num_bytes >= each[0] / 10), _UNITS[-1])
    value = num_bytes / scale
    return f"{value:.2f} {unit}" if value < 10 else f"{value:,.1f} {unit}"
