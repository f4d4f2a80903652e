"""The explorer: one look at a text, an image or a capture, for the terminal, the notebook, the web page and a file.

    >>> from regard.explorer import look_at, write_html
    >>> session = look_at("The animal didn't cross the street because it was too tired.")     # doctest: +SKIP
    >>> write_html(session, "animal.html")                                                    # doctest: +SKIP

What it is made of is in docs/explorer.md.
"""

from regard.explorer.export import write_html
from regard.explorer.widget import display
from regard.session.session import Session, look_at, look_at_image, open_file

__all__ = ["Session", "look_at", "look_at_image", "open_file", "write_html"]

Session.display = staticmethod(display)  # a notebook's cell that ends in a session shows the page
