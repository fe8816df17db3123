"""Pictures as rows of grey levels."""

import io
from pathlib import Path

import numpy as np


def pixels_of(source: Path | bytes, name: object, size: int) -> np.ndarray:
    """The grey levels (size, size) of an image file or its bytes; colours by ITU-R 601 luma. `name` is for complaints.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (2, 2), (255, 0, 0)).save(file, "PNG")
    >>> pixels_of(file.getvalue(), "red", 2)
    array([[76, 76],
           [76, 76]], dtype=uint8)
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            pixels = np.asarray(image.convert("L"))
    except OSError as error:
        raise ValueError(f"{name}: not a whole picture ({error}); copy it again.") from error
    if pixels.shape != (size, size):
        raise ValueError(f"{name}: {pixels.shape[1]}×{pixels.shape[0]} pixels; must be {size}×{size}.")
    return pixels
