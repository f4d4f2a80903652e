"""A picture as it is shown beside its attention: upright, no longer than 1,600 pixels, as the bytes of a JPEG or PNG.

    >>> import numpy as np
    >>> shown = show_picture(np.zeros((900, 2000, 3), np.uint8))
    >>> shown.size, shown.kind
    ((900, 2000), 'image/jpeg')

It knows no model, and nothing of where the picture came from but a name.
"""

from __future__ import annotations

from io import BytesIO

from regard.lens.files.file_photos import Photo
from regard.models.images.pictures import Source, open_picture

__all__ = ["LONGEST", "show_picture"]

LONGEST = 1600  # pixels of the longer side
FEW = 1 << 16  # pixels of a drawing or an icon, whose edges a JPEG would smear


def show_picture(source: Source) -> Photo:
    """A bounded copy of a picture, whatever `open_picture` opens. Raises as that does.

    >>> import numpy as np
    >>> show_picture(np.zeros((5, 7), np.uint8)).kind
    'image/png'
    """
    picture = open_picture(source)
    image = picture.image.copy()
    image.thumbnail((LONGEST, LONGEST))
    small = image.width * image.height <= FEW
    out = BytesIO()
    if small:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=88)
    return Photo(picture.name, picture.size, "image/png" if small else "image/jpeg", out.getvalue())
